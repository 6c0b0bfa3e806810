"""Balances the accepted trajectories against the trained ones: none may be lost or doubled.

accepted (acknowledged to a scripted worker) = trained + in a dropped group + stored, in no batch yet

A group may be trained without a sample that took too long, but never without an accepted one.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from echo2d.store.ledger import Ledger
from echo2d_lab.bench.soak.learner import SoakBatches
from echo2d_lab.bench.soak.seats import SoakAnswers


@dataclass(frozen=True, slots=True)
class Books:
    """Counts of trajectories. accepted: of scripted workers. trained, repeated: of all workers. lost:
    accepted ones whose group cannot be found. changed: accepted ones for which another output was
    trained on.
    """

    accepted: int
    trained: int
    dropped: int
    stored: int
    lost: tuple[tuple[int, int], ...]
    repeated: tuple[tuple[int, int], ...]
    changed: tuple[tuple[int, int], ...]

    def faults(self) -> list[str]:
        found = {
            "lost": self.lost,
            "trained twice": self.repeated,
            "not what was sent": self.changed,
        }
        return [f"{len(places)} trajectories {what}" for what, places in found.items() if places]


def balance(
    written: SoakAnswers, trained: SoakBatches, dropped: set[int], stored: set[int]
) -> Books:
    """Balance the books. dropped, stored: groups."""
    outputs = trained.outputs()
    trained_groups = {group for group, _ in outputs}
    lost, changed, counts = [], [], {"dropped": 0, "stored": 0}
    for tokens, (group, sample) in written.accepted.items():
        found = outputs.get((group, sample))
        if found == tokens:
            continue
        if found is not None:
            changed.append((group, sample))
        elif group in dropped:
            counts["dropped"] += 1
        elif group in stored and group not in trained_groups:
            counts["stored"] += 1
        else:
            lost.append((group, sample))
    return Books(
        accepted=len(written.accepted), trained=len(outputs), lost=tuple(lost),
        repeated=tuple(trained.repeated()), changed=tuple(changed), **counts,
    )  # fmt: skip


def dropped_groups(log_lines: Iterable[str]) -> set[int]:
    """The dropped groups in the log of a coordinator that ran with --log-json."""
    found = set()
    for line in log_lines:
        if '"dropped"' in line:
            found.add(int(json.loads(line)["group"]))
    return found


def stored_groups(ledger: Path) -> set[int]:
    """The groups of a ledger that is not in use."""
    with Ledger.open(ledger) as opened:
        recovered = opened.recover()
    return {stored.record.group for stored in recovered.groups}
