"""What `echo2d worker audit` does: reports from a run's audit log and convictions, and pardons."""

from pathlib import Path

from echo2d.core.audit.report import WorkerReport, summed_up
from echo2d.core.base.ids import PeerId
from echo2d.errors import OperatorFault
from echo2d.runtime.audit.audit_log import read_audit_log
from echo2d.runtime.run_dir.access_table import AccessTable
from echo2d.runtime.run_dir.run_directory import existing_run

# Of an id, to name a worker by its beginning.
_ID_CHARS_MIN = 4


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
    long_enough = len(worker) >= _ID_CHARS_MIN
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
