#!/usr/bin/env bash
# Hugging Face TRL on batches of a real coordinator and worker, in an environment of its own in .cache/trl (1.5 GB).
set -euo pipefail
time make trl-example
