#!/usr/bin/env bash
# In the laboratory: a small broadcast, counted exactly, and a learner on two hosts. Where there can be none it says why.
set -euo pipefail
# For the image; where they cannot be had its test says so.
if [[ $(id -u) == 0 ]] && ! { command -v buildah && command -v debootstrap; } >/dev/null; then
  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq buildah debootstrap; } >/dev/null ||
    echo "no buildah and debootstrap: no image is built"
fi
# For a box with systemd: unpacked and not installed, as systemd-analyze in 10-setup.
get_nspawn() {
  local folder=$PWD/.cache/systemd
  mkdir -p "$folder" &&
    { dpkg-query --show libsystemd-shared || DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends libsystemd-shared; } >/dev/null &&
    (cd "$folder" && rm -f systemd-container_*.deb && apt-get update -qq && apt-get download -qq systemd-container && dpkg-deb --extract systemd-container_*.deb .) &&
    "$folder/usr/bin/systemd-nspawn" --version | head -1
}
if [[ $(id -u) == 0 ]] && ! command -v systemd-nspawn && [[ ! -x .cache/systemd/usr/bin/systemd-nspawn ]]; then
  get_nspawn || echo "no systemd-nspawn: no box with systemd is booted"
fi
time make lab ARGS="-rs -k 'counted or leaves_the_seed or two_hosts or versions_of_a_run or first_hour or passes_versions_on or comes_back_and_stops'"
