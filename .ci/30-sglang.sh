#!/usr/bin/env bash
# One real SGLang server on the CPU keeps eight rows of the engine contract. Where it cannot be installed the last line
# says why. The rest is `make nightly-sglang`.
set -euo pipefail
code=0
bash tools/sglang_cpu/setup.sh || code=$?
((code != 3)) || { echo "sglang: skipped, see the line above"; exit 0; }
((code == 0)) || exit "$code"
.venv/bin/pytest tests/nightly/sglang/test_contract.py -m probe -rs
