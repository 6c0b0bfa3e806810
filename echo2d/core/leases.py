"""The leases that run now: who works on which samples of which group, until when silence is allowed.

    granted --(progress, results)--> granted ... --> ended: every sample answered, given back, silent, stuck, cancelled

A lease that ended with samples open may run again as the next attempt. Ids begin with a tag of this process, so that a
worker's lease from before a restart is never taken for one of now. Not here: groups, and who gets a lease.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

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
        return [lease for lease in self if lease.worker == worker]

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
        self._load[worker] += len(lease.samples)
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
            self._load[lease.worker] -= 1
        if not lease.samples:
            self.end(lease)
        return not lease.samples

    def end(self, lease: Lease) -> None:
        del self._running[lease.key]
        self._load[lease.worker] -= len(lease.samples)
        if not self._load[lease.worker]:
            del self._load[lease.worker]

    def expired(self, *, now: float) -> list[Lease]:
        return [lease for lease in self if now >= min(lease.silent_at, lease.stuck_at)]

    def wake_at(self) -> float | None:
        return min((min(lease.silent_at, lease.stuck_at) for lease in self), default=None)

    def check(self) -> None:
        load: Counter[PeerId] = Counter()
        for key, lease in self._running.items():
            assert key == lease.key
            assert lease.samples
            assert self.given(lease.key.lease)
            load[lease.worker] += len(lease.samples)
        assert load == self._load
        ids = [key.lease for key in self._running]
        assert len(ids) == len(set(ids)), "two attempts of one lease run"
