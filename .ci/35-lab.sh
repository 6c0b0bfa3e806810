#!/usr/bin/env bash
# One small broadcast in the laboratory, counted exactly, and a learner on two hosts; skipped, with the reason, where there can be none.
set -euo pipefail
time make lab ARGS="-rs -k 'counted or leaves_the_seed or two_hosts'"
