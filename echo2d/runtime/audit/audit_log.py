"""The audit log of a run: one JSON line for each answer that an audit scored, for `echo2d worker audit`.

    <run_dir>/audit.jsonl, audit.1.jsonl, ...   (`store/json_log.py`)

It is evidence for a person. Nothing is decided by it, and a restart does not read it.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from echo2d.core.audit.events import AuditTold
from echo2d.core.audit.report import WorkerReport, summed_up
from echo2d.core.base.ids import PeerId
from echo2d.errors import OperatorFault
from echo2d.runtime.run_dir.access_table import AccessTable
from echo2d.runtime.run_dir.run_directory import existing_run
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


# --- what `echo2d worker audit` does: reports from the log and the convictions, and pardons


def read_reports(run_dir: Path, worker: str | None) -> list[WorkerReport]:
    """The convicted workers first, then those with most flags.

    worker: a name, or the beginning of an id. OperatorFault: nothing is known of such a worker.
    """
    reports = summed_up(read_audit_log(run_dir))
    for peer, conviction in AccessTable(existing_run(run_dir)).convicted().items():
        report = reports.setdefault(peer, WorkerReport(peer))
        report.convicted, report.at_s = conviction.reason, conviction.at_s
    found = [
        report
        for report in reports.values()
        if worker is None or worker == report.name or report.worker.startswith(worker)
    ]
    if worker is not None and not found:
        raise OperatorFault(f"the audit of {run_dir} knows no worker {worker!r}")
    return sorted(found, key=lambda report: (not report.convicted, -report.flagged, report.name))


def pardon(run_dir: Path, worker: str) -> PeerId:
    """Pardon a convicted worker: its name, or the beginning of its id.

    OperatorFault: no convicted worker has it, or several have.
    """
    table = AccessTable(existing_run(run_dir))
    names = {peer: report.name for peer, report in summed_up(read_audit_log(run_dir)).items()}
    convicted = sorted(table.convicted())
    # Four characters of an id name a worker.
    long_enough = len(worker) >= 4
    found = [
        peer
        for peer in convicted
        if names.get(peer) == worker or (long_enough and peer.startswith(worker))
    ]
    if len(found) != 1:
        known = ", ".join(f"{peer} ({names.get(peer, 'no name')})" for peer in convicted)
        raise OperatorFault(
            f"worker {worker!r}: expected one convicted worker's name or id, of {known or 'nobody'}"
        )
    table.pardon(found[0])
    return found[0]
