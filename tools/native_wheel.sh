#!/usr/bin/env bash
# Builds the wheel, and installs it without a compiler: it must have the compiled loops. Then installs the
# source with a compiler that fails: numpy must be used instead.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$PWD/.venv/bin/python
compiler=${CC:-cc}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
git ls-files --cached --others --exclude-standard echo2d learner examples grafana scenarios systemd setup.py MANIFEST.in pyproject.toml README.md LICENSE |
  tar --create --files-from=- | tar --extract --directory="$folder" --one-top-level=source
# Programs run with only the virtual environment on PATH.
"$python" -m venv "$folder/venv"
alone() { (cd "$folder" && env --ignore-environment PATH="$folder/venv/bin" HOME="$folder" CC=/bin/false "$@"); }
pip=("$folder/venv/bin/python" -m pip --quiet --disable-pip-version-check install --no-deps)
codec=("$folder/venv/bin/python" -c 'from echo2d import native; print(native.codec())')

if command -v "$compiler" >/dev/null; then
  "$python" -m pip --quiet --disable-pip-version-check wheel --no-deps --no-build-isolation \
    --wheel-dir "$folder" "$folder/source"
  wheels=("$folder"/echo2d-*-cp311-abi3-linux_*.whl)
  [ -e "${wheels[0]}" ] || { echo "native-wheel: expected a wheel for cp311-abi3; found" "$folder"/*.whl; exit 1; }
  alone "${pip[@]}" "${wheels[0]}"
  found=$(alone "${codec[@]}")
  [ "$found" != numpy ] || { echo "native-wheel: the wheel has no compiled loops"; exit 1; }
  echo "native-wheel: $(basename "${wheels[0]}") installs without a compiler, codec $found"
  alone "$folder/venv/bin/python" -m pip --quiet uninstall --yes echo2d
  rm -rf "$folder/source/build" "$folder/source/"*.egg-info
else
  echo "native-wheel: no C compiler here (looked for $compiler): no wheel was built"
fi

"$python" -m pip --quiet --disable-pip-version-check --python "$folder/venv" install "setuptools>=77"
alone "${pip[@]}" --no-build-isolation "$folder/source"
found=$(alone "${codec[@]}")
[ "$found" = numpy ] || { echo "native-wheel: expected numpy without a compiler; found $found"; exit 1; }
echo "native-wheel: the source installs without a compiler, codec $found"
