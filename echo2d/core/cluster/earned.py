"""What each worker has earned in the run, across restarts: trajectories, and bytes passed on.

A count changes with the record that makes a result or a commit durable, and both are in one transaction.
Bytes are written with the next record of this kind. So a crash loses the bytes that came after the
last record. Bytes that a worker passes on while the coordinator is away are not counted.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from echo2d.core.base.bounded_dict import keep_newest
from echo2d.core.base.ids import PeerId
from echo2d.core.cluster.events import Persist


@dataclass(frozen=True, slots=True)
class WorkerEarned:
    """What one worker has earned."""

    worker: PeerId
    # Trajectories whose last token the worker wrote.
    accepted: int = 0
    trained: int = 0
    # Bytes of versions, as the worker reports them.
    sent_bytes: int = 0


@dataclass(frozen=True, slots=True)
class EarnedKept:
    """What these workers have earned. This record replaces their older records."""

    workers: tuple[WorkerEarned, ...]


class Earned:
    """See the module docstring."""

    def __init__(self, kept: Iterable[WorkerEarned] = ()) -> None:
        # By worker: accepted, trained, sent_bytes.
        self._of = defaultdict[PeerId, list[int]](partial(list, (0, 0, 0)))
        for each in kept:
            self._of[each.worker] = [each.accepted, each.trained, each.sent_bytes]
        # The workers whose record has changed: a set, in order.
        self._changed: dict[PeerId, None] = {}
        # Call `to_keep` at the end of this event.
        self.due = False

    def of(self, worker: PeerId) -> WorkerEarned:
        return WorkerEarned(worker, *self._of.get(worker, ()))

    def accepted(self, worker: PeerId) -> None:
        self._of[worker][0] += 1
        self._changed[worker], self.due = None, True

    def trained(self, workers: Iterable[PeerId]) -> None:
        """A batch was trained on. workers: the author of each trajectory."""
        for worker, count in Counter(workers).items():
            self._of[worker][1] += count
            self._changed[worker], self.due = None, True

    def sent(self, worker: PeerId, sent_bytes: int) -> None:
        if sent_bytes:
            self._of[worker][2] += sent_bytes
            self._changed[worker] = None

    def to_keep(self) -> Persist[EarnedKept]:
        """The records that have changed since the last call."""
        kept = tuple(map(self.of, self._changed))
        self._changed, self.due = {}, False
        # Twice as many workers as may be enrolled at once are kept; those that began to earn first are dropped.
        keep_newest(self._of, 20_000)
        return Persist(EarnedKept(kept))
