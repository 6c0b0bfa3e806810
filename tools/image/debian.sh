#!/usr/bin/env bash
# Makes a small Debian 12 with Python in a folder, without a registry: debian.sh FOLDER [PACKAGE...]
# Needs root and debootstrap.
set -euo pipefail
folder=$1 packages=python3,python3-venv,ca-certificates
shift
for each in "$@"; do packages+=,$each; done
debootstrap --variant=minbase "--include=$packages" bookworm "$folder"
# The certificates that this host trusts are copied, because there may be a proxy between here and the packages.
bundle=/etc/ssl/certs/ca-certificates.crt
cp -L "$bundle" "$folder$bundle"
