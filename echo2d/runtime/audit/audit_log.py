"""The audit log of a run: one JSON line for each answer that an audit scored, for `echo2d worker audit`.

    <run_dir>/audit.jsonl, audit.1.jsonl, ...   (`store/json_log.py`)

It is evidence for a person: no decision depends on it, and a restart does not read it.
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
        "rerouted": found.rerouted,
        "flags": list(told.reasons),
        "verdict": told.verdict,
    }


def read_audit_log(run_dir: Path) -> Iterator[dict[str, Any]]:
    """The lines of the log, the oldest first. OperatorFault: a file cannot be read."""
    return read_json_log(run_dir, LOG_NAME)


# --- what `echo2d worker audit` does: reports from the log and the convictions, and pardons


def read_reports(run_dir: Path, worker: str | None) -> list[WorkerReport]:
    """Reports on workers: the convicted first, then those with the most flags.

    worker: only this one, by its name or the beginning of its id. OperatorFault: no such worker is known.
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
    """Pardon the convicted worker with this name, or with an id that begins like this.

    OperatorFault: no convicted worker fits, or several do.
    """
    table = AccessTable(existing_run(run_dir))
    names = {peer: report.name for peer, report in summed_up(read_audit_log(run_dir)).items()}
    convicted = sorted(table.convicted())
    # Fewer than four characters of an id do not name a worker.
    long_enough = len(worker) >= 4
    found = [
        peer
        for peer in convicted
        if names.get(peer) == worker or (long_enough and peer.startswith(worker))
    ]
    if len(found) != 1:
        known = ", ".join(f"{peer} ({names.get(peer, 'no name')})" for peer in convicted)
        raise OperatorFault(
            f"worker {worker!r}: expected the name or id of one convicted worker; there are {known or 'none'}"
        )
    table.pardon(found[0])
    return found[0]
