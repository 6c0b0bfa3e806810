#!/usr/bin/env bash
# The page in a real browser: Debian's chromium, driven by playwright, which is kept in .cache/browser.
set -euo pipefail
time make browser-test
