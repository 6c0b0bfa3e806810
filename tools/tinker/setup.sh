#!/usr/bin/env bash
# Installs the official client of the Tinker API and its cookbook in an environment in .cache/tinker, kept between runs.
set -euo pipefail
cd "$(dirname "$0")/../.."
here=tools/tinker env=.cache/tinker
python=${PYTHON:-python3}
mkdir -p "$env"
wanted=$(cat "$here/requirements.txt" "$here/setup.sh" constraints.txt | sha256sum)
[[ -x $env/venv/bin/python && $(cat "$env/ready" 2>/dev/null) == "$wanted" ]] && exit 0
rm -rf "$env/venv" "$env/ready"
"$python" -m venv "$env/venv"
pip=("$env/venv/bin/pip" install --quiet --disable-pip-version-check)
"${pip[@]}" torch==2.13.0
"${pip[@]}" --constraint constraints.txt --requirement "$here/requirements.txt"
# It asks for a tml-renderers that no index has for Python 3.11. Recipes with text alone do not import it.
"${pip[@]}" --no-deps tinker-cookbook==0.6.1
echo "$wanted" >"$env/ready"
