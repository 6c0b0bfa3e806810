#!/usr/bin/env bash
# Installs a real browser for the page's tests: Debian's chromium, and playwright in .cache/browser, which is kept
# between runs. The last line of the output is a folder for PYTHONPATH.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python} version=1.65.2 folder=.cache/browser
if [[ $(cat "$folder/version" 2>/dev/null) != "$version" ]]; then
    rm -rf "$folder"
    # playwright uses the browser of the system, and downloads none.
    "$python" -m pip install --quiet --disable-pip-version-check --target "$folder" "playwright==$version" >&2
    echo "$version" >"$folder/version"
fi
if ! command -v chromium >/dev/null && command -v apt-get >/dev/null && [[ $(id -u) == 0 ]]; then
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends chromium fonts-dejavu-core; } >&2 ||
        true
fi
command -v chromium >/dev/null || { echo "there is no chromium: install it (apt-get install chromium)" >&2; exit 3; }
echo "$PWD/$folder"
