#!/usr/bin/env bash
set -euo pipefail
time make setup
# The base install alone must give a working coordinator and relay: no torch behind the back of `import echo2d.cli`.
.venv/bin/python - <<'PY'
import sys
import echo2d.cli, echo2d.runtime.coordinator, echo2d.runtime.worker
assert "torch" not in sys.modules, "torch is an extra"
PY
