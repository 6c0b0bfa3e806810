"""The audit log of a run: one JSON line for each answer that an audit scored, for `echo2d worker audit`.

    <run_dir>/audit.jsonl, audit.1.jsonl, ...   (`store/json_log.py`)

It is evidence for a person. Nothing is decided by it, and a restart does not read it.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from echo2d.core.audit.events import AuditTold
from echo2d.store.json_log import JsonLog, read_json_log

LOG_NAME = "audit"
LOG_BYTES_MAX = 64 << 20


def open_audit_log(run_dir: Path) -> JsonLog:
    return JsonLog(run_dir, LOG_NAME, LOG_BYTES_MAX)


def audit_record(told: AuditTold, now_s: float) -> dict[str, Any]:
    """A line of the log. now_s: Unix time."""
    found = told.found
    return {
        "at": round(now_s, 3),
        "worker": told.worker,
        "name": told.name,
        "group": told.group,
        "sample": told.sample,
        "versions": list(told.versions),
        "tokens": found.tokens,
        "k": found.k,
        "z": found.z,
        "cold": found.cold,
        "hot": found.hot,
        "misses": None if found.misses is None else list(found.misses),
        "flags": list(told.reasons),
        "verdict": told.verdict,
    }


def read_audit_log(run_dir: Path) -> Iterator[dict[str, Any]]:
    """The lines of the log, the oldest first. OperatorFault: a file cannot be read."""
    return read_json_log(run_dir, LOG_NAME)
