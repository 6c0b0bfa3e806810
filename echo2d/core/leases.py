"""The leases that run now: who works on which samples of which group, until when silence is allowed.

    granted --(progress, results)--> granted ... --> ended: every sample answered, given back, silent, stuck, cancelled

A lease that ended with samples open may run again as the next attempt. Ids begin with a tag of this process, so that a
worker's lease from before a restart is never taken for one of now. Not here: groups, and who gets a lease.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from echo2d.core.deadlines import Deadlines
from echo2d.core.ids import TAG_SHIFT, GroupId, LeaseId, PeerId
from echo2d.core.messages import HeldLease, VersionKey

STUCK_S = 180.0  # progress without a single token for so long is no progress (I6); workers give up after 120 s


@dataclass(slots=True)
class Lease:
    """One running attempt. served: by the worker when it was granted; no token will be of an older version."""

    key: HeldLease
    group: GroupId
    worker: PeerId
    served: VersionKey
    samples: set[int]
    silent_at: float
    stuck_at: float

    @property
    def ends_at(self) -> float:
        """When it expires, if nothing comes until then."""
        return min(self.silent_at, self.stuck_at)

    def idle_s(self, now: float) -> float:
        """How long its worker has reported it without a token; 0 if the worker is silent."""
        return now - (self.stuck_at - STUCK_S) if now < self.silent_at else 0.0


class Leases:
    """See the module docstring. `now` is monotonic seconds."""

    def __init__(self, tag: int, silence_s: float) -> None:
        self._next = tag << TAG_SHIFT
        self._first = self._next
        self._silence_s = silence_s
        self._running: dict[HeldLease, Lease] = {}
        self._load: Counter[PeerId] = Counter()
        self._by_worker: dict[PeerId, dict[HeldLease, Lease]] = {}
        self._ends = Deadlines[HeldLease](self._ends_at)
        self.changed: set[PeerId] = set()  # workers whose load is another one than when this was last emptied

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._running.values())

    def __len__(self) -> int:
        return len(self._running)

    def get(self, key: HeldLease) -> Lease | None:
        return self._running.get(key)

    def given(self, lease: LeaseId) -> bool:
        """Whether this process ever gave a lease of this id."""
        return self._first <= lease < self._next

    def load(self, worker: PeerId) -> int:
        """Samples that this worker holds."""
        return self._load[worker]

    def of_worker(self, worker: PeerId) -> list[Lease]:
        """By the start of the attempt."""
        return list(self._by_worker.get(worker, {}).values())

    def start(
        self,
        ended: HeldLease | None,
        group: GroupId,
        worker: PeerId,
        served: VersionKey,
        samples: Iterable[int],
        *,
        now: float,
    ) -> Lease:
        """A new lease, or the next attempt of an ended one."""
        if ended is None:
            key = HeldLease(LeaseId(self._next), 0)
            self._next += 1
        else:
            key = HeldLease(ended.lease, ended.attempt + 1)
        lease = Lease(key, group, worker, served, set(samples), now + self._silence_s, now + STUCK_S)
        self._running[key] = lease
        self._by_worker.setdefault(worker, {})[key] = lease
        self._ends.set(key)
        self._carry(worker, len(lease.samples))
        return lease

    def renew(self, lease: Lease, *, tokens: bool, now: float) -> None:
        """A sign of life. tokens: with output in it."""
        lease.silent_at = now + self._silence_s
        if tokens:
            lease.stuck_at = now + STUCK_S

    def answer(self, lease: Lease, sample: int) -> bool:
        """The sample is no longer this lease's; returns whether the lease ended with it."""
        if sample in lease.samples:
            lease.samples.remove(sample)
            self._carry(lease.worker, -1)
        if not lease.samples:
            self.end(lease)
        return not lease.samples

    def end(self, lease: Lease) -> None:
        del self._running[lease.key]
        del self._by_worker[lease.worker][lease.key]
        if not self._by_worker[lease.worker]:
            del self._by_worker[lease.worker]
        self._carry(lease.worker, -len(lease.samples))

    def expired(self, *, now: float) -> list[Lease]:
        first = self._ends.earliest()
        return [] if first is None or now < first else [lease for lease in self if now >= lease.ends_at]

    def wake_at(self) -> float | None:
        return self._ends.earliest()

    def _ends_at(self, key: HeldLease) -> float | None:
        lease = self._running.get(key)
        return None if lease is None else lease.ends_at

    def _carry(self, worker: PeerId, samples: int) -> None:
        """So many more, or fewer."""
        self._load[worker] += samples
        if not self._load[worker]:
            del self._load[worker]
        self.changed.add(worker)

    def check(self) -> None:
        load: Counter[PeerId] = Counter()
        for key, lease in self._running.items():
            assert key == lease.key
            assert lease.samples
            assert self.given(lease.key.lease)
            load[lease.worker] += len(lease.samples)
        assert load == self._load
        held = {key: lease for leases in self._by_worker.values() for key, lease in leases.items()}
        assert held == self._running
        assert all(leases for leases in self._by_worker.values())
        assert all(lease.worker == worker for worker, leases in self._by_worker.items() for lease in leases.values())
        self._ends.check(self._running)
        ids = [key.lease for key in self._running]
        assert len(ids) == len(set(ids)), "two attempts of one lease run"
