#!/usr/bin/env bash
# Installs Hugging Face TRL in an environment in .cache/trl, with echo2d and its learner's torch; kept between runs.
set -euo pipefail
cd "$(dirname "$0")/../.."
here=tools/trl env=.cache/trl
python=${PYTHON:-python3}
mkdir -p "$env"
wanted=$(cat "$here/requirements.txt" "$here/setup.sh" pyproject.toml constraints.txt | sha256sum)
[[ -x $env/venv/bin/python && $(cat "$env/ready" 2>/dev/null) == "$wanted" ]] && exit 0
rm -rf "$env/venv" "$env/ready"
"$python" -m venv "$env/venv"
pip=("$env/venv/bin/pip" install --quiet --disable-pip-version-check)
"${pip[@]}" torch==2.13.0
"${pip[@]}" --constraint constraints.txt --requirement "$here/requirements.txt" --editable '.[torch]'
echo "$wanted" >"$env/ready"
