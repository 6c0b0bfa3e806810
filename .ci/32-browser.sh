#!/usr/bin/env bash
# One page in a real browser: Debian's chromium, driven by playwright. Where it cannot be had the last line says why.
# The rest is `make nightly-browser`.
set -euo pipefail
code=0
folder=$(bash tools/page/setup.sh | tail -1) || code=$?
((code != 3)) || { echo "browser: skipped, there is no chromium"; exit 0; }
((code == 0)) || exit "$code"
PYTHONPATH=$folder .venv/bin/pytest tests/nightly/browser -m probe -rs
