"""What each worker has earned in the run, across restarts: trajectories, and bytes passed on.

A count changes with the record that makes a result or a commit durable, and both are in one transaction.
Bytes are written with the next such record: a crash forgets those after it, and nobody counts those
that a worker passes on while the coordinator is away.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from echo2d.core.base.bounded_dict import keep_newest
from echo2d.core.base.ids import PeerId
from echo2d.core.cluster.events import Persist

# Workers that earned something last; twice as many as may be enrolled at once.
EARNED_MAX = 20_000


@dataclass(frozen=True, slots=True)
class WorkerEarned:
    """accepted, trained: trajectories whose last token it wrote. sent_bytes: of versions, as it says."""

    worker: PeerId
    accepted: int = 0
    trained: int = 0
    sent_bytes: int = 0


@dataclass(frozen=True, slots=True)
class EarnedKept:
    """They replace what was known of these workers."""

    workers: tuple[WorkerEarned, ...]


class Earned:
    """See the module docstring. kept: the worker that earned something last comes last."""

    def __init__(self, kept: Iterable[WorkerEarned] = ()) -> None:
        self._of = {each.worker: each for each in kept}
        # The worker that changed last comes last (a set in order).
        self._changed: dict[PeerId, None] = {}
        self._due = False

    def of(self, worker: PeerId) -> WorkerEarned:
        return self._of.get(worker) or WorkerEarned(worker)

    def accepted(self, worker: PeerId) -> None:
        before, self._due = self.of(worker), True
        self._set(worker, before.accepted + 1, before.trained, before.sent_bytes)

    def trained(self, workers: Iterable[PeerId]) -> None:
        """workers: who wrote each trajectory of a batch."""
        for worker, count in Counter(workers).items():
            before, self._due = self.of(worker), True
            self._set(worker, before.accepted, before.trained + count, before.sent_bytes)

    def sent(self, worker: PeerId, sent_bytes: int) -> None:
        before = self.of(worker)
        if sent_bytes:
            self._set(worker, before.accepted, before.trained, before.sent_bytes + sent_bytes)

    def to_keep(self) -> list[Persist[EarnedKept]]:
        """What has changed since the last call, if something must be kept now."""
        if not self._due:
            return []
        kept = EarnedKept(tuple(map(self.of, self._changed)))
        self._changed, self._due = {}, False
        return [Persist(kept)]

    def _set(self, worker: PeerId, *counts: int) -> None:
        for each in (self._of, self._changed):
            each.pop(worker, None)
        self._of[worker], self._changed[worker] = WorkerEarned(worker, *counts), None
        keep_newest(self._of, EARNED_MAX)
