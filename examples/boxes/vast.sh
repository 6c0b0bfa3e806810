#!/usr/bin/env bash
# Starts one box on Vast.ai: vast.sh OFFER SCRIPT. Not tried there (README.md). The script comes from
# `echo2d join --print-script onstart`.
set -euo pipefail
[ $# = 2 ] || {
  echo "usage: vast.sh OFFER SCRIPT" >&2
  exit 2
}
image=${IMAGE:-nvidia/cuda:12.8.1-runtime-ubuntu24.04}
vastai create instance "$1" --image "$image" --disk "${DISK_GB:-64}" --label "$(basename "$2" .sh)" \
  --onstart "$2" --ssh --raw
