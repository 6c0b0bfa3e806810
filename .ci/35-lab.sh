#!/usr/bin/env bash
# In the laboratory: a small broadcast, counted exactly, and a learner on two hosts. Where there can be none it says why.
set -euo pipefail
time make lab ARGS="-rs -k 'counted or leaves_the_seed or two_hosts or versions_of_a_run or first_hour'"
