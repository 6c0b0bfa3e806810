#!/usr/bin/env bash
# A short demo: the loop closes and the books balance. The accuracy bar belongs to the default step count.
set -euo pipefail
out=$(mktemp)
trap 'rm -f "$out"' EXIT
time make -s demo ARGS="--steps 12 --json" >"$out"
.venv/bin/python - "$out" <<'PY'
import json, sys
result = json.loads(open(sys.argv[1]).read().splitlines()[-1])
assert result["steps"] == 12, result
assert result["max_staleness"] <= result["staleness_bound"], result
assert all(worker["version"] == 12 and worker["digest_ok"] for worker in result["workers"]), result
print("demo:", {key: result[key] for key in ("steps", "max_staleness", "seed_copies", "bubble_ratio")})
PY
