"""An index of the workers' free slots: which version each worker serves, how fast it is, how many slots are free.

    alive worker --serves a version, no rest--> ranked within its version: the fastest first, then most free slots
                 +-- serves nothing, or rests --> counted in `slots` only

Slow workers come last, whatever they serve. If workers hold several versions, they are also ranked within each of
these, for samples that one version alone may write.
The index is updated worker by worker, so that placing one sample does not read all workers. The caller
reports every worker that may have changed (`refresh`).
Not here: which version a sample needs, and which sample comes next (`scheduler`).
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from echo2d.core.base.deadline_queue import DeadlineQueue
from echo2d.core.base.ids import PeerId, Version
from echo2d.core.cluster.events import VersionPublished
from echo2d.core.cluster.peer import Peer
from echo2d.core.protocol.control_messages import VersionKey
from echo2d.core.work.deliveries import RANK_MAX, RANK_MIN, RANK_SLOW, UNBOUND, Bounds

Live = Callable[[VersionKey], VersionPublished | None]


class FreeSlots(NamedTuple):
    """A worker with this many slots, of which `free` are not used by leases."""

    worker: PeerId
    slots: int
    free: int


class _Row(NamedTuple):
    """What is known about one alive, active worker."""

    serving: VersionKey | None
    held: frozenset[VersionKey]  # what leases may name
    slots: int
    rest_until: float
    rank: int
    free: int


_RANKS = RANK_MAX - RANK_MIN + 1
_NONE = frozenset[VersionKey]()

# A worker with a free slot: its rank, minus its free slots, its id, its slots.
_Ranked = tuple[int, int, PeerId, int]


@dataclass(slots=True)
class WorkersByVersion:
    """The workers that serve or hold one version and do not rest."""

    # (rank, -free, worker, slots) of each worker with a free slot, sorted.
    ranked: list[_Ranked] = field(default_factory=list)
    workers: int = 0
    # The sums of slots and of free slots by rank, from RANK_MIN on.
    slots: list[int] = field(default_factory=lambda: [0] * _RANKS)
    free: list[int] = field(default_factory=lambda: [0] * _RANKS)

    def put(self, worker: PeerId, row: _Row) -> None:
        self.workers += 1
        self.slots[row.rank - RANK_MIN] += row.slots
        self.move(worker, row, 0, row.free)

    def take(self, worker: PeerId, row: _Row) -> None:
        self.workers -= 1
        self.slots[row.rank - RANK_MIN] -= row.slots
        self.move(worker, row, row.free, 0)

    def move(self, worker: PeerId, row: _Row, before: int, after: int) -> None:
        """Record that the worker had `before` free slots and now has `after`."""
        rank, slots = row.rank, row.slots
        self.free[rank - RANK_MIN] += after - before
        if before:
            del self.ranked[bisect_left(self.ranked, (rank, -before, worker, slots))]
        if after:
            insort(self.ranked, (rank, -after, worker, slots))

    def first_of_each_rank(self) -> Iterator[_Ranked]:
        """For each rank, the worker with the most free slots."""
        at, ranked = 0, self.ranked
        while at < len(ranked):
            yield ranked[at]
            at = bisect_left(ranked, (ranked[at][0] + 1,), at)


class WorkerChoice:
    """The workers that may write a sample, best first: not slow before slow, then the newest version, then
    the fastest, then the most free slots.
    """

    def __init__(self, versions: list[WorkersByVersion], *, slowest: int = RANK_MAX) -> None:
        self._versions, self._slowest = versions, slowest
        end = slowest - RANK_MIN + 1
        # The sums over these workers up to rank `slowest`, at the time of the choice.
        self.slots = sum([sum(workers.slots[:end]) for workers in versions])
        self.free = sum([sum(workers.free[:end]) for workers in versions])

    def __iter__(self) -> Iterator[FreeSlots]:
        """The workers with a free slot."""
        for ranked, begin, end in self._parts():
            for at in range(begin, end):
                _, free, worker, slots = ranked[at]
                yield FreeSlots(worker, slots, -free)

    def place(self, samples: Sequence[int]) -> list[tuple[PeerId, tuple[int, ...]]]:
        """Distribute as many samples as there are free slots: (worker, its samples), best worker first.

        If one worker that is not slow has enough free slots, it gets them all: it computes the prompt only once.
        """
        for workers in self._versions:
            for rank, free, worker, _ in workers.first_of_each_rank():
                if rank < min(RANK_SLOW, self._slowest + 1) and -free >= len(samples):
                    return [(worker, tuple(samples))]
        placed, start = [], 0
        for each in self:
            if start >= len(samples):
                break
            placed.append((each.worker, tuple(samples[start : start + each.free])))
            start += each.free
        return placed

    def _parts(self) -> Iterator[tuple[list[_Ranked], int, int]]:
        """The parts of the rankings in the order of the choice: (ranking, begin, end)."""
        begins = [0] * len(self._versions)
        for rank in (RANK_SLOW, RANK_MAX + 1):
            end = min(rank, self._slowest + 1)
            ends = [bisect_left(each.ranked, (end,)) for each in self._versions]
            for workers, begin, cut in zip(self._versions, begins, ends, strict=True):
                yield workers.ranked, begin, cut
            begins = ends


class WorkerRanking:
    """See the module docstring. `now` is monotonic seconds. several: whether workers hold several versions."""

    def __init__(self, *, several: bool = False) -> None:
        self._several = several
        self._rows: dict[PeerId, _Row] = {}
        # By the version that they serve, and by each version that they hold (only with `several`).
        self._versions: dict[VersionKey, WorkersByVersion] = {}
        self._holders: dict[VersionKey, WorkersByVersion] = {}
        self._resting: dict[PeerId, float] = {}
        self._rests = DeadlineQueue[PeerId](self._resting.get)
        self._now = 0.0
        # The slots of all alive, active workers, and the free slots of the ranked ones.
        self.slots = 0
        self.free = 0
        # Grows whenever anything about a worker changes.
        self.changes = 0

    def refresh(
        self,
        worker: PeerId,
        peer: Peer | None,
        load: int,
        reserved: int = 0,
        bounds: Bounds = UNBOUND,
    ) -> None:
        """Record the present state of a worker; None: it is forgotten.

        load: how many samples it holds. reserved: how many of its slots count as absent. bounds: how many samples of
        all kinds it may hold, and its rank; workers with the smallest rank come first.
        """
        before, after = self._rows.get(worker), _row(peer, load, reserved, bounds)
        if after is not None and self._several and peer is not None:
            after = after._replace(held=peer.engine.held)
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
        """Rank the workers again whose rest has ended."""
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
        """When the next rest ends."""
        return self._rests.earliest()

    def choose(
        self, oldest: Version, live: Live, newest: Version | None = None, slowest: int = RANK_MAX
    ) -> WorkerChoice:
        """The workers that serve version `oldest` or a newer one, but none newer than `newest`.

        live: returns a version's record. slowest: the last rank that counts.
        """
        records = [(live(key), workers) for key, workers in self._versions.items()]
        usable = [
            (record.publish_seq, workers)
            for record, workers in records
            if record and record.version >= oldest and (newest is None or record.version <= newest)
        ]
        found = [workers for _, workers in sorted(usable, key=lambda pair: -pair[0])]
        return WorkerChoice(found, slowest=slowest)

    def choose_holders(self, named: VersionKey) -> WorkerChoice:
        """The workers that hold this version."""
        holders = self._holders.get(named)
        return WorkerChoice([] if holders is None else [holders])

    # --- inside

    def _moved(self, worker: PeerId, before: _Row, after: _Row) -> bool:
        """Make the usual change in place: only the number of free slots differs."""
        if before[:-1] != after[:-1] or after.serving is None or worker in self._resting:
            return False
        self._rows[worker] = after
        for workers in self._of(after):
            workers.move(worker, after, before.free, after.free)
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
            self.free -= row.free
            _take(self._versions, row.serving, worker, row)
            for key in row.held:
                _take(self._holders, key, worker, row)

    def _rank(self, worker: PeerId, row: _Row) -> None:
        if row.serving is not None:
            self.free += row.free
            _put(self._versions, row.serving, worker, row)
            for key in row.held:
                _put(self._holders, key, worker, row)

    def _of(self, row: _Row) -> list[WorkersByVersion]:
        """Where a worker is ranked that serves a version."""
        assert row.serving is not None
        return [self._versions[row.serving], *(self._holders[key] for key in row.held)]

    def check(
        self, workers: Iterable[PeerId], refresh: Callable[["WorkerRanking", PeerId], None]
    ) -> None:
        """Assert that the index equals a newly built one: every change was reported. refresh: the caller's own."""
        fresh = WorkerRanking(several=self._several)
        fresh.rested(now=self._now)
        for worker in workers:
            refresh(fresh, worker)
        assert (fresh._rows, fresh._versions) == (self._rows, self._versions)
        assert fresh._holders == self._holders
        assert (fresh._resting, fresh.slots, fresh.free) == (self._resting, self.slots, self.free)
        self._rests.check(self._resting)


def _row(peer: Peer | None, load: int, reserved: int, bounds: Bounds) -> _Row | None:
    if peer is None or peer.kind != "worker" or not peer.alive:
        return None
    # `PeerService.retiring` is written out here, because this runs several times for each trajectory.
    told = peer.service
    if not told.active or told.leaving or told.cordoned or told.misreports or told.held_back:
        return None
    allowed, rank = bounds
    slots = max(0, min(allowed, peer.slots) - reserved)
    if told.slots_allowed is not None:
        slots = min(slots, told.slots_allowed)
    free = slots - load if slots > load else 0
    return _Row(peer.engine.serving, _NONE, slots, told.rest_until, rank, free)


def _put(
    versions: dict[VersionKey, WorkersByVersion], key: VersionKey, worker: PeerId, row: _Row
) -> None:
    workers = versions.get(key)
    if workers is None:
        workers = versions[key] = WorkersByVersion()
    workers.put(worker, row)


def _take(
    versions: dict[VersionKey, WorkersByVersion], key: VersionKey, worker: PeerId, row: _Row
) -> None:
    workers = versions[key]
    workers.take(worker, row)
    if not workers.workers:
        del versions[key]
