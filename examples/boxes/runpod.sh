#!/usr/bin/env bash
# Starts one box on RunPod: runpod.sh GPU_TYPE SCRIPT. Not tried there (README.md). The script comes from
# `echo2d join --print-script onstart`. RUNPOD_API_KEY is the account's; the package `runpod` is installed beside python3.
set -euo pipefail
[ $# = 2 ] || {
  echo "usage: runpod.sh GPU_TYPE SCRIPT" >&2
  exit 2
}
IMAGE=${IMAGE:-nvidia/cuda:12.8.1-runtime-ubuntu24.04} python3 - "$1" "$2" <<'PYTHON'
import base64, os, sys
from pathlib import Path

import runpod

gpu, script = sys.argv[1], Path(sys.argv[2])
runpod.api_key = os.environ["RUNPOD_API_KEY"]
pod = runpod.create_pod(
    name=script.stem,
    image_name=os.environ["IMAGE"],
    gpu_type_id=gpu,
    container_disk_in_gb=64,
    # The script holds a secret: it comes as a variable, and not as words of a command.
    env={"ECHO2D_BOX": base64.b64encode(script.read_bytes()).decode()},
    docker_args="bash -c 'echo $ECHO2D_BOX | base64 -d | bash'",
)
print(pod["id"])
PYTHON
