#!/usr/bin/env bash
# One broadcast between real daemons on emulated links, counted exactly. Where there can be no laboratory it says why.
# The rest is `make nightly-lab`.
set -euo pipefail
.venv/bin/pytest tests/nightly/lab/test_broadcast.py -m probe -rs
