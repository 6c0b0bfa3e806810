#!/usr/bin/env bash
# The whole loop with two SGLang workers, where 36-sglang.sh could install it.
set -euo pipefail
[[ -e .cache/sglang/ready ]] || { echo "sglang: skipped, it is not installed here"; exit 0; }
time make sglang-test ARGS="-s -k grpo"
