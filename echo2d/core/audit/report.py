"""Sum up for a person what the audit log of a run says about each worker."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from echo2d.core.base.ids import PeerId

# A report shows this many of a worker's last flagged answers.
SHOWN_MAX = 10


@dataclass(slots=True)
class WorkerReport:
    """What the log says about one worker."""

    worker: PeerId
    name: str = ""
    audited: int = 0
    flagged: int = 0
    tokens: int = 0
    # Tokens that are not where their seed points, within the narrowest tolerance.
    misses: int = 0
    # Means over the worker's audited answers.
    k: float = 0.0
    z: float = 0.0
    # Why the worker was convicted; empty: it was not.
    convicted: str = ""
    # When the worker was convicted (Unix time).
    at_s: float | None = None
    flags: dict[str, int] = field(default_factory=dict)
    # The worker's last flagged answers, as the log has them.
    evidence: list[Mapping[str, Any]] = field(default_factory=list)

    def add(self, line: Mapping[str, Any]) -> None:
        """Take in one line of the log."""
        self.name = line["name"]
        self.audited += 1
        self.flagged += bool(line["flags"])
        self.tokens += line["tokens"]
        self.misses += (line["misses"] or (0,))[0]
        self.k += (line["k"] - self.k) / self.audited
        self.z += (line["z"] - self.z) / self.audited
        for flag in line["flags"]:
            self.flags[flag] = self.flags.get(flag, 0) + 1
        if line["flags"] or line["verdict"]:
            self.evidence = [*self.evidence, line][-SHOWN_MAX:]


def summed_up(lines: Iterable[Mapping[str, Any]]) -> dict[PeerId, WorkerReport]:
    """A report for each worker that the log names."""
    reports: dict[PeerId, WorkerReport] = {}
    for line in lines:
        worker = PeerId(line["worker"])
        reports.setdefault(worker, WorkerReport(worker)).add(line)
    return reports
