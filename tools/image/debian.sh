#!/usr/bin/env bash
# Puts a small Debian 12 with Python together in a folder, without a registry: debian.sh FOLDER [PACKAGE...]
# Needs root and debootstrap.
set -euo pipefail
folder=$1 packages=python3,python3-venv,ca-certificates
shift
for each in "$@"; do packages+=,$each; done
debootstrap --variant=minbase "--include=$packages" bookworm "$folder"
# Whom this host trusts: there may be a proxy between here and the packages.
bundle=/etc/ssl/certs/ca-certificates.crt
cp -L "$bundle" "$folder$bundle"
