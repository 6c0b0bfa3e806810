"""Which workers have room for samples: kept up to date worker by worker, so that a grant need not look at all of them.

    alive workers --rested, serve a version--> rooms of that version --a slot free--> ranked: most free first
                  +-- rest, serve nothing --> counted only

The caller says of whom something may have changed (`refresh`). Not here: which version may be used, and who gets what.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from echo2d.core.base.deadline_queue import DeadlineQueue
from echo2d.core.base.ids import PeerId, Version
from echo2d.core.cluster.events import VersionPublished
from echo2d.core.cluster.membership import Peer
from echo2d.core.protocol.control_messages import VersionKey
from echo2d.core.rollouts.placement import FreeSlots

Live = Callable[[VersionKey], VersionPublished | None]


class _Row(NamedTuple):
    """What is known of one alive, active worker."""

    serving: VersionKey | None
    slots: int
    rest_until: float
    free: int


@dataclass(slots=True)
class WorkersByVersion:
    """The rested workers that serve one version. ranked: (-free, worker, slots) of those with a free slot, sorted."""

    ranked: list[tuple[int, PeerId, int]] = field(default_factory=list)
    workers: int = 0
    slots: int = 0
    free: int = 0

    def put(self, worker: PeerId, row: _Row) -> None:
        self.workers += 1
        self.slots += row.slots
        self.move(worker, 0, row.free, row.slots)

    def take(self, worker: PeerId, row: _Row) -> None:
        self.workers -= 1
        self.slots -= row.slots
        self.move(worker, row.free, 0, row.slots)

    def move(self, worker: PeerId, before: int, after: int, slots: int) -> None:
        """It has other free slots than before."""
        self.free += after - before
        if before:
            del self.ranked[bisect_left(self.ranked, (-before, worker, slots))]
        if after:
            insort(self.ranked, (-after, worker, slots))


class WorkerChoice:
    """The rooms that may be used for a group, best first: the newest version, then most free slots."""

    def __init__(self, versions: list[WorkersByVersion]) -> None:
        self._versions = versions
        self.slots = sum(rooms.slots for rooms in versions)
        self.free = sum(rooms.free for rooms in versions)

    def __iter__(self) -> Iterator[FreeSlots]:
        """Those with a free slot."""
        for rooms in self._versions:
            for free, worker, slots in rooms.ranked:
                yield FreeSlots(worker, slots, -free)

    def with_free(self, samples: int) -> FreeSlots | None:
        """The best one that has room for so many."""
        for rooms in self._versions:
            if rooms.ranked and -rooms.ranked[0][0] >= samples:
                free, worker, slots = rooms.ranked[0]
                return FreeSlots(worker, slots, -free)
        return None


class WorkerRanking:
    """See the module docstring. `now` is monotonic seconds."""

    def __init__(self) -> None:
        self._rows: dict[PeerId, _Row] = {}
        self._versions: dict[VersionKey, WorkersByVersion] = {}
        self._resting: dict[PeerId, float] = {}
        self._rests = DeadlineQueue[PeerId](self._resting.get)
        self._now = 0.0
        self.slots = 0  # of all alive, active workers
        self.free = 0  # of those that are ranked
        self.changes = 0  # one more whenever a worker is another than before

    def refresh(self, worker: PeerId, peer: Peer | None, load: int, lent: int = 0) -> None:
        """The worker as it is now; None: it is forgotten. lent: slots that are as good as not there."""
        before, after = self._rows.get(worker), _row(peer, load, lent)
        if before == after:
            return
        self.changes += 1
        if before is not None and after is not None and self._ranks_on(worker, before, after):
            return
        if before is not None:
            self._leave(worker, before)
        if after is not None:
            self._enter(worker, after)

    def rested(self, *, now: float) -> None:
        """Those whose rest is over are ranked again."""
        self._now = now
        while (first := self._rests.first()) is not None and first[0] <= now:
            worker = first[1]
            self.changes += 1
            del self._resting[worker]
            self._rank(worker, self._rows[worker])

    def free_of(self, worker: PeerId) -> int:
        """The free slots of a worker that is ranked."""
        row = self._rows.get(worker)
        return 0 if row is None or worker in self._resting else row.free

    def wake_at(self) -> float | None:
        """When the next rest is over."""
        return self._rests.earliest()

    def choose(self, oldest: Version, live: Live) -> WorkerChoice:
        """The rooms of workers that serve this version or a newer one."""
        records = [(live(key), rooms) for key, rooms in self._versions.items()]
        usable = [
            (record.publish_seq, rooms)
            for record, rooms in records
            if record and record.version >= oldest
        ]
        return WorkerChoice([rooms for _, rooms in sorted(usable, key=lambda pair: -pair[0])])

    # --- inside

    def _ranks_on(self, worker: PeerId, before: _Row, after: _Row) -> bool:
        """The usual change, made in place: it has more or fewer free slots than before."""
        if before[:-1] != after[:-1] or after.serving is None or worker in self._resting:
            return False
        self._rows[worker] = after
        self._versions[after.serving].move(worker, before.free, after.free, after.slots)
        self.free += after.free - before.free
        return True

    def _enter(self, worker: PeerId, row: _Row) -> None:
        self._rows[worker] = row
        self.slots += row.slots
        if row.rest_until > self._now:
            self._resting[worker] = row.rest_until
            self._rests.set(worker)
        else:
            self._rank(worker, row)

    def _leave(self, worker: PeerId, row: _Row) -> None:
        del self._rows[worker]
        self.slots -= row.slots
        if self._resting.pop(worker, None) is None and row.serving is not None:
            rooms = self._versions[row.serving]
            rooms.take(worker, row)
            self.free -= row.free
            if not rooms.workers:
                del self._versions[row.serving]

    def _rank(self, worker: PeerId, row: _Row) -> None:
        if row.serving is not None:
            self._versions.setdefault(row.serving, WorkersByVersion()).put(worker, row)
            self.free += row.free

    def check(
        self,
        peers: Iterable[Peer],
        load: Callable[[PeerId], int],
        lent: Callable[[PeerId], int] = lambda _: 0,
    ) -> None:
        """Nothing has changed of which nobody said so, and all adds up."""
        fresh = WorkerRanking()
        fresh.rested(now=self._now)
        for peer in peers:
            fresh.refresh(peer.peer, peer, load(peer.peer), lent(peer.peer))
        assert (fresh._rows, fresh._versions) == (self._rows, self._versions)
        assert (fresh._resting, fresh.slots, fresh.free) == (self._resting, self.slots, self.free)
        self._rests.check(self._resting)


def _row(peer: Peer | None, load: int, lent: int) -> _Row | None:
    if peer is None or peer.kind != "worker" or not peer.alive or not peer.active or peer.leaving:
        return None
    slots = max(0, peer.slots - lent)
    return _Row(peer.serving, slots, peer.rest_until, slots - load if slots > load else 0)
