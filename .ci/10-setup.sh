#!/usr/bin/env bash
set -euo pipefail
# SGLang's environment is installed beside echo2d's: each pip keeps one core busy, and waits for the network. Why it
# cannot be had is said by the step that uses it.
bash tools/sglang_cpu/setup.sh &>/dev/null &
sglang=$!
bash tools/page/setup.sh &>/dev/null &
page=$!
make setup
wait "$sglang" || true
wait "$page" || true
# The base install alone must give a working coordinator and relay: no torch behind the back of `import echo2d.cli`.
.venv/bin/python - <<'PY'
import sys
import echo2d.cli, echo2d.runtime.coordinator.main, echo2d.runtime.worker.main
assert "torch" not in sys.modules, "torch is an extra"
PY

# systemd-analyze, for the test of the units. Its package is unpacked and never installed: what it runs at installation
# sets up the machine (users, /tmp, services), and this one belongs to somebody. Its libraries come as a plain package.
get_systemd_analyze() {
  local folder=$PWD/.cache/systemd
  mkdir -p "$folder" &&
    apt-get update -qq &&
    DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends libsystemd-shared >/dev/null &&
    (cd "$folder" && apt-get download -qq systemd && dpkg-deb --extract systemd_*.deb .) &&
    install "$folder/usr/bin/systemd-analyze" .venv/bin/ &&
    .venv/bin/systemd-analyze --version
}
if ! command -v systemd-analyze && command -v apt-get && [[ $(id -u) == 0 ]]; then
  get_systemd_analyze || { rm -f .venv/bin/systemd-analyze && echo "no systemd-analyze: the units go unverified here"; }
fi
