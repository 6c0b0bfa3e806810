"""An index of the workers' free slots: who serves which version, and who has the most free slots.

    alive worker --serves a version, no rest--> ranked within its version: most free slots first
                 +-- serves nothing, or rests --> counted in `slots` only

The index is updated worker by worker, so that placing one sample does not look at all workers. The
caller reports every worker that may have changed (`refresh`).
Not here: which version a sample needs, and which sample comes next (`scheduler`).
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from echo2d.core.base.deadline_queue import DeadlineQueue
from echo2d.core.base.ids import PeerId, Version
from echo2d.core.cluster.events import VersionPublished
from echo2d.core.cluster.membership import Peer
from echo2d.core.protocol.control_messages import VersionKey

Live = Callable[[VersionKey], VersionPublished | None]


class FreeSlots(NamedTuple):
    """A worker with this many slots, of which `free` are not taken by leases."""

    worker: PeerId
    slots: int
    free: int


class _Row(NamedTuple):
    """What is known of one alive, active worker."""

    serving: VersionKey | None
    slots: int
    rest_until: float
    free: int


@dataclass(slots=True)
class WorkersByVersion:
    """The workers that serve one version and do not rest.

    ranked: (-free, worker, slots) of each worker with a free slot, sorted.
    """

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
        """The number of the worker's free slots changes from `before` to `after`."""
        self.free += after - before
        if before:
            del self.ranked[bisect_left(self.ranked, (-before, worker, slots))]
        if after:
            insort(self.ranked, (-after, worker, slots))


class WorkerChoice:
    """The workers that may write a sample, best first: the newest version, then most free slots.

    slots, free: the sums over all of these workers, when the choice was made.
    """

    def __init__(self, versions: list[WorkersByVersion]) -> None:
        self._versions = versions
        self.slots = sum(workers.slots for workers in versions)
        self.free = sum(workers.free for workers in versions)

    def __iter__(self) -> Iterator[FreeSlots]:
        """The workers with a free slot."""
        for workers in self._versions:
            for free, worker, slots in workers.ranked:
                yield FreeSlots(worker, slots, -free)

    def place(self, samples: Sequence[int]) -> list[tuple[PeerId, tuple[int, ...]]]:
        """Deal out as many samples as there are free slots: (worker, its samples), best worker first.

        One worker gets them all if one has enough free slots, because it computes their prompt once.
        """
        for workers in self._versions:
            if workers.ranked and -workers.ranked[0][0] >= len(samples):
                return [(workers.ranked[0][1], tuple(samples))]
        placed, start = [], 0
        for each in self:
            if start >= len(samples):
                break
            placed.append((each.worker, tuple(samples[start : start + each.free])))
            start += each.free
        return placed


class WorkerRanking:
    """See the module docstring. `now` is monotonic seconds."""

    def __init__(self) -> None:
        self._rows: dict[PeerId, _Row] = {}
        self._versions: dict[VersionKey, WorkersByVersion] = {}
        self._resting: dict[PeerId, float] = {}
        self._rests = DeadlineQueue[PeerId](self._resting.get)
        self._now = 0.0
        # The slots of all alive, active workers, and the free slots of the ranked ones.
        self.slots = 0
        self.free = 0
        # Grows whenever anything about a worker changes.
        self.changes = 0

    def refresh(self, worker: PeerId, peer: Peer | None, load: int, reserved: int = 0) -> None:
        """Take note of a worker as it is now; None: it is forgotten.

        load: samples that it holds. reserved: slots that count as absent.
        """
        before, after = self._rows.get(worker), _row(peer, load, reserved)
        if before == after:
            return
        self.changes += 1
        if before is not None and after is not None and self._moved(worker, before, after):
            return
        if before is not None:
            self._leave(worker, before)
        if after is not None:
            self._enter(worker, after)

    def rested(self, *, now: float) -> None:
        """Rank the workers whose rest is over again."""
        self._now = now
        while (first := self._rests.first()) is not None and first[0] <= now:
            worker = first[1]
            self.changes += 1
            del self._resting[worker]
            self._rank(worker, self._rows[worker])

    def free_of(self, worker: PeerId) -> int:
        """The free slots of a worker; 0 while it rests."""
        row = self._rows.get(worker)
        return 0 if row is None or worker in self._resting else row.free

    def wake_at(self) -> float | None:
        """When the next rest is over."""
        return self._rests.earliest()

    def choose(self, oldest: Version, live: Live, newest: Version | None = None) -> WorkerChoice:
        """The workers that serve version `oldest` or a newer one, but none newer than `newest`.

        live: looks up a version's record.
        """
        records = [(live(key), workers) for key, workers in self._versions.items()]
        usable = [
            (record.publish_seq, workers)
            for record, workers in records
            if record and record.version >= oldest and (newest is None or record.version <= newest)
        ]
        return WorkerChoice([workers for _, workers in sorted(usable, key=lambda pair: -pair[0])])

    # --- inside

    def _moved(self, worker: PeerId, before: _Row, after: _Row) -> bool:
        """Make the usual change in place: only the number of free slots differs."""
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
            workers = self._versions[row.serving]
            workers.take(worker, row)
            self.free -= row.free
            if not workers.workers:
                del self._versions[row.serving]

    def _rank(self, worker: PeerId, row: _Row) -> None:
        if row.serving is not None:
            self._versions.setdefault(row.serving, WorkersByVersion()).put(worker, row)
            self.free += row.free

    def check(
        self,
        peers: Iterable[Peer],
        load: Callable[[PeerId], int],
        reserved: Callable[[PeerId], int] = lambda _: 0,
    ) -> None:
        """The index equals one that is built anew: every change was reported."""
        fresh = WorkerRanking()
        fresh.rested(now=self._now)
        for peer in peers:
            fresh.refresh(peer.peer, peer, load(peer.peer), reserved(peer.peer))
        assert (fresh._rows, fresh._versions) == (self._rows, self._versions)
        assert (fresh._resting, fresh.slots, fresh.free) == (self._resting, self.slots, self.free)
        self._rests.check(self._resting)


def _row(peer: Peer | None, load: int, reserved: int) -> _Row | None:
    if peer is None or peer.kind != "worker" or not peer.alive:
        return None
    # `Peer.retiring`, written out: this is asked several times for each trajectory.
    if not peer.active or peer.leaving or peer.cordoned or peer.held_back:
        return None
    slots = max(0, peer.slots - reserved)
    if peer.slots_allowed is not None:
        slots = min(slots, peer.slots_allowed)
    return _Row(peer.serving, slots, peer.rest_until, slots - load if slots > load else 0)
