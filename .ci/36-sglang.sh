#!/usr/bin/env bash
# Real SGLang servers on the CPU, installed into .cache/sglang (3 minutes, nothing on a later run). Where that is not
# possible the last line says why.
set -euo pipefail
code=0
time bash tools/sglang_cpu/setup.sh || code=$?
((code != 3)) || { echo "sglang: skipped, see the line above"; exit 0; }
((code == 0)) || exit "$code"
time make sglang-test ARGS="-s -k 'not grpo'"
