#!/usr/bin/env bash
set -euo pipefail
# The codec in C: its property tests under sanitizers; a wheel that installs where there is no compiler.
time make native-sanitize ARGS="--messages 1000"
time make native-wheel
