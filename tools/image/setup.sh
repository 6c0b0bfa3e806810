#!/usr/bin/env bash
# Installs the programs for the tests of the image and of a booted box, as root on Debian: buildah, debootstrap,
# systemd-nspawn. If a program is not available, the test that needs it says so.
set -euo pipefail
cd "$(dirname "$0")/../.."
[[ $(id -u) == 0 ]] && command -v apt-get >/dev/null || exit 0
get() { DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends "$@" >/dev/null; }
if ! { command -v buildah && command -v debootstrap; } >/dev/null; then
  { apt-get update -qq && get buildah debootstrap; } || echo "no buildah and debootstrap: no image is built"
fi
# The package is unpacked and not installed, because its installation would change the setup of this machine.
get_nspawn() {
  local folder=$PWD/.cache/systemd
  mkdir -p "$folder" &&
    { dpkg-query --show libsystemd-shared >/dev/null || get libsystemd-shared; } &&
    (cd "$folder" && rm -f systemd-container_*.deb && apt-get update -qq && apt-get download -qq systemd-container && dpkg-deb --extract systemd-container_*.deb .) &&
    "$folder/usr/bin/systemd-nspawn" --version | head -1
}
if ! command -v systemd-nspawn >/dev/null && [[ ! -x .cache/systemd/usr/bin/systemd-nspawn ]]; then
  get_nspawn || echo "no systemd-nspawn: no box with systemd is booted"
fi
