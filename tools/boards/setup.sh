#!/usr/bin/env bash
# Unpacks Prometheus and promtool from Debian's package into .cache/boards, without installing it. The last line of the
# output names their folder. Exit code 3: they are not available here, and the last line says why.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=$PWD/.cache/boards
if command -v promtool >/dev/null && command -v prometheus >/dev/null; then
    dirname "$(command -v promtool)"
    exit 0
fi
if [[ ! -x $folder/usr/bin/promtool ]]; then
    command -v apt-get >/dev/null || { echo "no Prometheus: neither it nor apt-get is here"; exit 3; }
    rm -rf "$folder" && mkdir -p "$folder"
    if ! (cd "$folder" && { apt-get download -qq prometheus || { apt-get update -qq && apt-get download -qq prometheus; }; }) >&2; then
        echo "no Prometheus: apt-get cannot download its package"
        exit 3
    fi
    (cd "$folder" && dpkg-deb --extract prometheus_*.deb . && rm prometheus_*.deb)
fi
"$folder/usr/bin/promtool" --version >/dev/null 2>&1 || { echo "no Prometheus: the package does not run here"; exit 3; }
echo "$folder/usr/bin"
