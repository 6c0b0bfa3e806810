#!/usr/bin/env bash
# The page in a real browser: Debian's chromium, driven by playwright, which is kept in .cache/browser. Where it cannot
# be had the last line says why.
set -euo pipefail
code=0
time bash tools/page/setup.sh || code=$?
((code != 3)) || { echo "browser: skipped, see the line above"; exit 0; }
((code == 0)) || exit "$code"
time make browser-test
