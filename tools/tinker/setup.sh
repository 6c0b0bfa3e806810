#!/usr/bin/env bash
# Installs the official client of the Tinker API and its cookbook in an environment in .cache/tinker, kept between runs.
# ECHO2D_RELEASE: this release of the client instead, alone, in the newest packages that it may have.
set -euo pipefail
cd "$(dirname "$0")/../.."
here=tools/tinker env=${ECHO2D_SERVERS:-.cache}/tinker
release=${ECHO2D_RELEASE:-}
python=${PYTHON:-python3}
mkdir -p "$env"
wanted=$(echo "$release" | cat - "$here/requirements.txt" "$here/setup.sh" constraints.txt | sha256sum)
[[ -x $env/venv/bin/python && $(cat "$env/ready" 2>/dev/null) == "$wanted" ]] && exit 0
rm -rf "$env/venv" "$env/ready"
"$python" -m venv "$env/venv"
pip=("$env/venv/bin/pip" install --quiet --disable-pip-version-check)
"${pip[@]}" torch==2.13.0
if [[ $release ]]; then
    "${pip[@]}" "tinker==$release"
else
    "${pip[@]}" --constraint constraints.txt --requirement "$here/requirements.txt"
    # It asks for a tml-renderers that no index has for Python 3.11. Recipes with text alone do not import it.
    "${pip[@]}" --no-deps tinker-cookbook==0.6.1
fi
echo "$wanted" >"$env/ready"
