#!/usr/bin/env bash
# Installs SGLang for the CPU in an environment in .cache/sglang: 2.6 GB, about 3 minutes, kept between runs.
# Exit code 3: this machine cannot have it, and the last line says why.
set -euo pipefail
cd "$(dirname "$0")/../.."
here=tools/sglang_cpu env=${ECHO2D_SERVERS:-.cache}/sglang
version=${ECHO2D_RELEASE:-0.5.23}
python=${PYTHON:-python3}
cannot() { echo "no SGLang here: $*" >&2; exit 3; }
[[ $(uname -sm) == "Linux x86_64" ]] || cannot "its wheels are for Linux on x86_64"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || cannot "it needs Python 3.11 or newer"
mkdir -p "$env"
wanted=$(echo "$version" | cat - "$here/requirements.txt" "$here/setup.sh" | sha256sum)
[[ -x $env/venv/bin/python && $(cat "$env/ready" 2>/dev/null) == "$wanted" ]] && exit 0
(($(df --output=avail -k "$env" | tail -1) > 6000000)) || cannot "less than 6 GB are free in $env"
rm -rf "$env/venv" "$env/ready"
"$python" -m venv "$env/venv"
pip=("$env/venv/bin/pip" install --quiet --disable-pip-version-check)
"${pip[@]}" torch==2.13.0 || cannot "torch cannot be installed"
"${pip[@]}" -r "$here/requirements.txt" || cannot "its dependencies cannot be installed"
"${pip[@]}" --no-deps "sglang==$version" torchvision==0.28.0 || cannot "sglang cannot be installed"
echo "$wanted" >"$env/ready"
