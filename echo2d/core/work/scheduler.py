"""The scheduler: places samples of every kind of work on the workers' free slots.

    kinds, by priority --pending--> the next samples --a free slot--> grant: a lease at that worker
                          ^                         +-- none -------> skipped
                          +---------- ask again until no slot is free -------+

A kind of work decides which of its samples wait and in which order (admission), when it goes before
other kinds (priority), and from which version on a worker may write a sample. The scheduler finds
the worker: the newest version first, then most free slots. A kind never holds up another one,
except by its priority. The first kind is the run's groups. Slots that other kinds hold are not
there for it.
Not here: what the kinds are (`group_work`, and the gateway's calls), the index of free slots
(`worker_ranking`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol, TypeVar

from echo2d.core.base.ids import PeerId, Version
from echo2d.core.cluster.events import Send
from echo2d.core.cluster.membership import Membership, Peer
from echo2d.core.cluster.statistics import Statistics
from echo2d.core.cluster.versions import PublishedVersions
from echo2d.core.protocol.control_messages import LeaseCancelled
from echo2d.core.work.events import RolloutAction
from echo2d.core.work.leases import Lease, LeaseTable, send_to
from echo2d.core.work.ranking import WorkerChoice, WorkerRanking


@dataclass(frozen=True, slots=True)
class PendingSamples:
    """Samples of one prompt that wait for slots. As many of them are placed as there are slots.

    oldest: workers that serve this version or a newer one may write them; newest: but none that is
    newer than this.
    preferred: a single sample goes to this worker if it has a free slot. there_alone: and to no other one.
    suits: whether a worker may get a single sample; None: every worker may.
    """

    samples: Sequence[int]
    oldest: Version
    preferred: PeerId | None = None
    suits: Callable[[PeerId], bool] | None = None
    newest: Version | None = None
    there_alone: bool = False


Pending = TypeVar("Pending", bound=PendingSamples)


class KindOfWork(Protocol[Pending]):
    """What the scheduler needs to know of one kind of work.

    leases: those of its samples that run.
    """

    @property
    def leases(self) -> LeaseTable: ...

    def priority(self, *, now: float) -> int:
        """The kind with the smallest number is served first."""

    def pending(self, *, now: float) -> Iterator[Pending]:
        """What waits, in the order in which it is to be placed.

        When the iterator goes on, the samples before have been granted, or cannot be placed now.
        """

    def grant(
        self, pending: Pending, worker: Peer, samples: Sequence[int], *, now: float
    ) -> Sequence[RolloutAction]:
        """Lease these samples to the worker, which has a session and serves a version."""


class LeaseScheduler:
    """See the module docstring. `now` is monotonic seconds."""

    def __init__(
        self, *, members: Membership, versions: PublishedVersions, statistics: Statistics
    ) -> None:
        self._members = members
        self._versions = versions
        self._statistics = statistics
        self._ranking = WorkerRanking()
        self._kinds: list[KindOfWork[Any]] = []

    def add(self, kind: KindOfWork[Any]) -> None:
        """Serve this kind of work, too. The first one added is the run's."""
        self._kinds.append(kind)

    @property
    def slots(self) -> int:
        """The slots of all alive, active workers, less those held by kinds other than the run's."""
        return self._ranking.slots

    @property
    def changes(self) -> int:
        """Grows whenever anything about a worker changes."""
        return self._ranking.changes

    def load(self, worker: PeerId) -> int:
        """The samples of all kinds that a worker holds."""
        return sum([kind.leases.load(worker) for kind in self._kinds])

    def free_at(self, worker: PeerId) -> int:
        """The free slots of a worker, as of the last `refresh`."""
        return self._ranking.free_of(worker)

    def free_from(self, oldest: Version) -> int:
        """The free slots at workers of this version or a newer one, as of the last `refresh`."""
        return self.free_workers(oldest).free

    def free_workers(self, oldest: Version) -> WorkerChoice:
        """The workers of this version or a newer one that have free slots, as of the last `refresh`."""
        return self._ranking.choose(oldest, self._versions.live)

    def wake_at(self) -> float | None:
        """When the next worker has rested."""
        return self._ranking.wake_at()

    def fill(self, *, now: float) -> list[RolloutAction]:
        """Grant what can be granted, kind by kind."""
        self.refresh(now=now)
        actions: list[RolloutAction] = []
        if not self._ranking.free:
            return actions
        for kind in sorted(self._kinds, key=lambda kind: kind.priority(now=now)):
            actions += self._fill(kind, now)
        return actions

    def cancel(self, lease: Lease) -> list[Send]:
        """Tell the worker of a lease to stop; the caller ends the lease."""
        key = lease.key
        return send_to(self._members.get(lease.worker), LeaseCancelled(key.lease, key.attempt))

    def cancel_all(self, worker: PeerId) -> list[Send]:
        """Tell a worker to stop all that it holds; the caller ends these leases."""
        held = [lease for kind in self._kinds for lease in kind.leases.of_worker(worker)]
        return [send for lease in held for send in self.cancel(lease)]

    def refresh(self, *, now: float) -> None:
        """Take note of the workers and loads that have changed."""
        self._ranking.rested(now=now)
        tables = [kind.leases for kind in self._kinds]
        all_changed = [self._members.changed, *[table.changed for table in tables]]
        run, workers = tables[0], set[PeerId]().union(*all_changed)
        if not workers:
            return
        for worker in workers:
            peer, load = self._members.get(worker), run.load(worker)
            self._ranking.refresh(worker, peer, load, self._reserved(worker))
            if peer is not None and peer.kind == "worker":
                measurements = self._statistics.measurements
                measurements.holds(worker, peer.slots, load, now=self._statistics.now)
        for changed in all_changed:
            changed.clear()

    # --- inside

    def _fill(self, kind: KindOfWork[Any], now: float) -> list[RolloutAction]:
        actions: list[RolloutAction] = []
        waiting = kind.pending(now=now)
        # Many samples may wait for one version: remember from which version on no slot is free.
        no_slot_from: Version | None = None
        while self._ranking.free and (pending := next(waiting, None)) is not None:
            if no_slot_from is not None and pending.oldest >= no_slot_from:
                continue
            if pending.there_alone and self._waits_there(pending):
                continue
            workers = self._ranking.choose(pending.oldest, self._versions.live, pending.newest)
            if not workers.free:
                no_slot_from = pending.oldest if pending.newest is None else no_slot_from
                continue
            placed = self._place(pending, workers)
            for worker, samples in placed:
                peer = self._members.get(worker)
                assert peer is not None
                actions += kind.grant(pending, peer, samples, now=now)
            if placed:
                self.refresh(now=now)
        return actions

    def _place(
        self, pending: PendingSamples, workers: WorkerChoice
    ) -> list[tuple[PeerId, tuple[int, ...]]]:
        """Which workers get which of the samples; empty: they cannot be placed now."""
        if len(pending.samples) > 1:
            return workers.place(pending.samples)
        usual = pending.preferred
        preferred = [] if usual is None or not self._may_write(usual, pending) else [usual]
        others = () if pending.there_alone else workers
        for worker in chain(preferred, (each.worker for each in others)):
            if pending.suits is None or pending.suits(worker):
                return [(worker, tuple(pending.samples))]
        return []

    def _waits_there(self, pending: PendingSamples) -> bool:
        """Whether it waits for one worker, which is full. Very many turns of episodes may wait so at every event."""
        usual = pending.preferred
        return usual is not None and not self._may_write(usual, pending)

    def _may_write(self, worker: PeerId, pending: PendingSamples) -> bool:
        peer = self._members.get(worker)
        record = None if peer is None else self._versions.live(peer.serving)
        if record is None or (pending.newest is not None and record.version > pending.newest):
            return False
        return record.version >= pending.oldest and self.free_at(worker) > 0

    def _reserved(self, worker: PeerId) -> int:
        return sum([kind.leases.load(worker) for kind in self._kinds[1:]])

    def check(self) -> None:
        run = self._kinds[0].leases
        self._ranking.check(self._members, run.load, self._reserved)
