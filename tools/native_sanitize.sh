#!/usr/bin/env bash
# Runs the property tests of the compiled loops with AddressSanitizer and UndefinedBehaviorSanitizer:
# every read and write past the end of a buffer, and every undefined operation, ends the tests.
#
#     tools/native_sanitize.sh [options of pytest, such as --messages 100000 --rng-seed 7]
set -euo pipefail
cd "$(dirname "$0")/.."
python=$PWD/.venv/bin/python
compiler=${CC:-cc}
if ! command -v "$compiler" >/dev/null; then
  echo "native-sanitize: no C compiler here (looked for $compiler): not run"
  exit 0
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
# The extension is built in a copy, so that the one in use stays unchanged.
git ls-files --cached --others --exclude-standard echo2d learner tests tools/lab setup.py pyproject.toml README.md LICENSE |
  tar --create --files-from=- | tar --extract --directory="$folder"
cd "$folder"
ln -s ../learner echo2d/learner  # nothing is installed here, and the tests refuse another checkout's learner
flags="-g -O1 -Werror -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all"
CFLAGS=$flags LDFLAGS=-fsanitize=address,undefined "$python" setup.py --quiet build_ext --inplace
[ -e echo2d/native/_words.abi3.so ] || { echo "native-sanitize: the extension was not built"; exit 1; }
export LD_PRELOAD ASAN_OPTIONS=detect_leaks=0:abort_on_error=1 PYTHONMALLOC=malloc PYTHONPATH=$folder:$folder/tools/lab
LD_PRELOAD=$("$compiler" -print-file-name=libasan.so):$("$compiler" -print-file-name=libubsan.so)
"$python" -m pytest -p no:cacheprovider --capture=sys tests/shells/native tests/unit/core/weights/test_delta_split.py \
  tests/unit/core/weights/test_delta_words.py tests/unit/property/weights/test_codecs.py "$@"
