#!/usr/bin/env bash
# Builds the image `echo2d` of this checkout with buildah, on a Debian that debian.sh makes.
# Needs root, buildah and debootstrap (apt-get install buildah debootstrap).
#
#   tools/image/build.sh [EXTRA]     EXTRA as in the Containerfile, such as [torch]
set -euo pipefail
cd "$(dirname "$0")/../.."
export STORAGE_DRIVER=${STORAGE_DRIVER:-vfs} BUILDAH_ISOLATION=${BUILDAH_ISOLATION:-chroot}
base=localhost/debian-python
for program in buildah debootstrap; do
  command -v "$program" >/dev/null || { echo "$program is missing: apt-get install buildah debootstrap" >&2; exit 2; }
done
if ! buildah inspect --type image "$base" &>/dev/null; then
  root=$(mktemp -d)
  trap 'rm -rf "$root"' EXIT
  tools/image/debian.sh "$root"
  container=$(buildah from scratch)
  buildah add --quiet "$container" "$root" /
  buildah config --env PIP_CERT=/etc/ssl/certs/ca-certificates.crt "$container"
  buildah commit --quiet --rm "$container" "$base"
fi
buildah build --network host --build-arg "BASE=$base" --build-arg "EXTRA=${1:-}" --tag echo2d .
