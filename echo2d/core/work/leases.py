"""The running leases of all kinds of work: which worker holds which samples, and when each lease expires.

    granted --progress, results--> granted ... --> ended: every sample answered, given back,
                                                          silent, stuck, or cancelled

A lease that ended with open samples may run again as the next attempt. Lease ids begin with a tag of this process, so
that leases from before a restart can continue. A lease's group number shows which kind of work the lease belongs to.
The reported output of unfinished samples is kept with the lease, in memory only.
Not here: which worker gets a lease and what happens when one ends (`scheduler`), and which output is believed
(each kind of work).
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from echo2d.core.base.deadline_queue import DeadlineQueue
from echo2d.core.base.ids import TAG_SHIFT, GroupId, LeaseId, PeerId
from echo2d.core.cluster.events import Send
from echo2d.core.cluster.peer import Peer
from echo2d.core.protocol.columns import columns_bytes
from echo2d.core.protocol.control_messages import (
    HeldLease,
    LeaseCancelled,
    LeaseFailed,
    LeaseProgress,
    SampleAnswered,
    SampleDelta,
    SampleFinished,
    VersionKey,
)
from echo2d.core.protocol.trajectory import NOTHING, Partial
from echo2d.core.work.events import LeaseGiven, TurnKept

# A lease that makes no token for this long is stuck (I6). Workers themselves give up after 120 s.
STUCK_S = 180.0
# The bits of a group's number from this one on are the number of its kind of work (`kind`). A group id has 63 bits on
# the wire.
KIND_SHIFT = 60
# The kind of work whose samples the learner trains on. Slots that other kinds hold do not count for it.
TRAINING = 0
# The output of unfinished samples takes at most this much: 32 million tokens without columns, enough for 1,000 workers.
GATHERED_BYTES_MAX = 256 << 20


@dataclass(slots=True)
class Lease:
    """One running attempt, as it was `given`."""

    key: HeldLease
    given: LeaseGiven
    samples: set[int]  # the samples that are still open
    # The most tokens that each sample may have beyond the base.
    room: int
    # When the attempt began or was resumed. If it continues from tokens: when the first attempt began.
    since: float
    begun: float  # when this attempt began
    wrote_at: float  # when it last made a token
    silent_at: float
    stuck_at: float
    kind: int  # the number of its kind of work
    # The output of open samples so far, beyond the base; None: no longer known.
    outputs: dict[int, Partial | None] = field(default_factory=dict)
    # The most tokens beyond the base that were reported of each sample.
    longest: dict[int, int] = field(default_factory=dict)
    # The version that it names, at whatever worker; None: its worker writes with what it serves.
    named: VersionKey | None = None

    def grows(self, deltas: Iterable[SampleDelta]) -> int:
        """How many more tokens the lease's samples have now than were ever reported before.

        Repeated tokens do not count: otherwise a worker could hold a lease for as long as it likes.
        """
        grown = 0
        for delta in deltas:
            end = delta.spans[-1].end if delta.spans else 0
            whole = end and len(delta.tokens) == 4 * (end - delta.spans[0].start)
            longest = self.longest.get(delta.sample, 0)
            if whole and delta.sample in self.samples and longest < end <= self.room:
                self.longest[delta.sample] = end
                grown += end - longest
        return grown

    @property
    def worker(self) -> PeerId:
        return self.given.worker

    @property
    def ends_at(self) -> float:
        """When the lease expires if it is not renewed."""
        return min(self.silent_at, self.stuck_at)

    def idle_s(self, now: float) -> float:
        """Seconds since its last token; 0 if its worker is silent."""
        return now - (self.stuck_at - STUCK_S) if now < self.silent_at else 0.0


class LeaseTable:
    """See the module docstring. `now` is monotonic seconds."""

    def __init__(self, tag: int, silence_s: float) -> None:
        self._next = tag << TAG_SHIFT
        self._first = self._next
        self._silence_s = silence_s
        self._running: dict[HeldLease, Lease] = {}
        # How many samples a worker holds: of all kinds, and of kinds other than training.
        self._load: Counter[PeerId] = Counter()
        self._reserved: Counter[PeerId] = Counter()
        self._count: Counter[int] = Counter()
        self._resumed: set[LeaseId] = set()
        self._gathered_bytes = 0
        self._by_worker: dict[PeerId, dict[HeldLease, Lease]] = {}
        self._ends = DeadlineQueue[HeldLease](self._ends_at)
        # The workers whose load has changed since the scheduler last cleared this set.
        self.changed: set[PeerId] = set()

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._running.values())

    def __len__(self) -> int:
        return len(self._running)

    def get(self, key: HeldLease) -> Lease | None:
        return self._running.get(key)

    def held(
        self, peer: Peer, message: LeaseProgress | SampleFinished | LeaseFailed
    ) -> Lease | None:
        """The running lease that a worker's message is about; None: it ended, or is another worker's."""
        lease = self._running.get(HeldLease(message.lease, message.attempt))
        return lease if lease is not None and lease.worker == peer.peer else None

    def given(self, lease: LeaseId) -> bool:
        """Whether this process ever granted or resumed a lease with this id."""
        return self._first <= lease < self._next or lease in self._resumed

    def guessed(self, peer: Peer, message: LeaseProgress | SampleFinished | LeaseFailed) -> bool:
        """Whether the message is about a lease of another worker, or one that this process never gave.

        An honest worker sends one or two such messages after the coordinator has restarted.
        """
        lease = self._running.get(HeldLease(message.lease, message.attempt))
        others = lease is not None and lease.worker != peer.peer
        return others or not self.given(message.lease)

    def resumed(self, lease: LeaseId) -> bool:
        """Whether the lease was granted before a restart."""
        return lease in self._resumed

    @property
    def tokens_under_way(self) -> int:
        """Tokens of unfinished samples that workers have reported."""
        running = self._running.values()
        return sum([len(o.tokens) // 4 for lease in running for o in lease.outputs.values() if o])

    @property
    def samples(self) -> int:
        """The number of samples that all workers hold."""
        return sum(self._load.values())

    def count(self, kind: int) -> int:
        """The number of leases of this kind."""
        return self._count[kind]

    def load(self, worker: PeerId) -> int:
        """The number of samples that this worker holds."""
        return self._load.get(worker, 0)

    def reserved(self, worker: PeerId) -> int:
        """The number of samples that this worker holds of kinds other than training."""
        return self._reserved.get(worker, 0)

    def of_worker(self, worker: PeerId) -> list[Lease]:
        """The leases of this worker, in the order of their start."""
        return list(self._by_worker.get(worker, {}).values())

    def start(
        self,
        ended: HeldLease | None,
        group: GroupId,
        worker: PeerId,
        served: VersionKey,
        samples: Iterable[int],
        base: Partial = NOTHING,
        *,
        room: int,
        since: float | None = None,
        now: float,
    ) -> Lease:
        """Start a new lease, or the next attempt of an ended one.

        base: the tokens that its only sample has already. since: when that sample was begun. room: as in `Lease`.
        """
        if ended is None:
            lease, attempt = LeaseId(self._next), 0
            self._next += 1
        else:
            lease, attempt = ended.lease, ended.attempt + 1
        given = LeaseGiven(group, lease, attempt, worker, tuple(samples), served, base)
        return self._run(given, given.samples, room, now, now if since is None else since)

    def resume(self, given: LeaseGiven, samples: Iterable[int], *, room: int, now: float) -> Lease:
        """Continue an attempt that has ended, or is from before a restart, with its open samples."""
        if not self.given(given.lease):
            self._resumed.add(given.lease)
        return self._run(given, samples, room, now, now)

    def _run(
        self, given: LeaseGiven, samples: Iterable[int], room: int, now: float, since: float
    ) -> Lease:
        silent_at = now + self._silence_s
        kind = given.group >> KIND_SHIFT
        lease = Lease(
            given.key, given, set(samples), room, since, now, now, silent_at, now + STUCK_S, kind
        )
        self._running[lease.key] = lease
        self._by_worker.setdefault(lease.worker, {})[lease.key] = lease
        self._ends.set(lease.key)
        self._count[kind] += 1
        self._carry(lease, len(lease.samples))
        return lease

    def renew(self, lease: Lease, *, tokens: bool, refits: bool = False, now: float) -> None:
        """Record a sign of life. tokens: the lease has made new tokens. refits: it cannot make any before its
        worker has a newer version, which may take REFIT_S.
        """
        lease.silent_at = now + self._silence_s
        if tokens:
            lease.wrote_at = now
            lease.stuck_at = now + STUCK_S
        elif refits:
            # In exclusive mode a worker makes no token while it receives a version, which may never
            # arrive.
            lease.stuck_at = min(now + STUCK_S, lease.wrote_at + 300.0)

    def gather(self, lease: Lease, sample: int, output: Partial | None) -> None:
        """Remember the output of a sample so far; None: it is not known.

        If there is no room for it, its columns are left out; if there is still none, it counts as not known until the
        worker reports it again from its first token.
        """
        size = _size(output)
        self._gathered_bytes -= _size(lease.outputs.get(sample))
        if output is not None and self._gathered_bytes + size > GATHERED_BYTES_MAX:
            output = replace(output, columns=())
            size = _size(output)
        if self._gathered_bytes + size > GATHERED_BYTES_MAX:
            output, size = None, 0
        lease.outputs[sample] = output
        self._gathered_bytes += size

    def answer(self, lease: Lease, sample: int) -> bool:
        """Take a sample out of this lease. Returns whether the lease ended with it."""
        if sample in lease.samples:
            if lease.outputs:
                self._forget(lease, sample)
            lease.samples.remove(sample)
            self._carry(lease, -1)
        if not lease.samples:
            self.end(lease)
        return not lease.samples

    def end(self, lease: Lease) -> None:
        """End a lease. Its outputs stay in the object for the caller, and are no longer counted."""
        worker = lease.worker
        del self._running[lease.key]
        if lease.outputs:
            self._gathered_bytes -= sum(map(_size, lease.outputs.values()))
        others = self._by_worker[worker]
        del others[lease.key]
        if not others:
            del self._by_worker[worker]
        self._count[lease.kind] -= 1
        if lease.samples:
            self._carry(lease, -len(lease.samples))

    def expired(self, *, now: float) -> list[Lease]:
        first = self._ends.earliest()
        return (
            []
            if first is None or now < first
            else [lease for lease in self if now >= lease.ends_at]
        )

    def wake_at(self) -> float | None:
        return self._ends.earliest()

    def _ends_at(self, key: HeldLease) -> float | None:
        lease = self._running.get(key)
        return None if lease is None else lease.ends_at

    def _carry(self, lease: Lease, samples: int) -> None:
        """Record that the lease's worker holds this many more samples of its kind (fewer if negative)."""
        worker = lease.given.worker
        self._load[worker] = load = self._load.get(worker, 0) + samples
        if not load:
            del self._load[worker]
        if lease.kind != TRAINING:
            self._reserved[worker] += samples
            if not self._reserved[worker]:
                del self._reserved[worker]
        self.changed.add(worker)

    def _forget(self, lease: Lease, sample: int) -> None:
        self._gathered_bytes -= _size(lease.outputs.pop(sample, None))

    def check(self) -> None:
        load: Counter[PeerId] = Counter()
        reserved: Counter[PeerId] = Counter()
        for key, lease in self._running.items():
            assert key == lease.key
            assert lease.samples
            assert self.given(lease.key.lease)
            assert lease.outputs.keys() <= lease.samples <= set(lease.given.samples)
            load[lease.worker] += len(lease.samples)
            if lease.kind != TRAINING:
                reserved[lease.worker] += len(lease.samples)
        assert (load, reserved) == (self._load, self._reserved)
        assert +self._count == Counter(lease.kind for lease in self)
        outputs = [output for lease in self for output in lease.outputs.values()]
        assert sum(map(_size, outputs)) == self._gathered_bytes <= GATHERED_BYTES_MAX
        held = {key: lease for leases in self._by_worker.values() for key, lease in leases.items()}
        assert held == self._running
        assert all(leases for leases in self._by_worker.values())
        assert all(
            lease.worker == worker
            for worker, leases in self._by_worker.items()
            for lease in leases.values()
        )
        self._ends.check(self._running)
        ids = [key.lease for key in self._running]
        assert len(ids) == len(set(ids)), "two attempts of one lease run"


def kind_of(group: GroupId) -> int:
    """The number of the kind of work that this group belongs to."""
    return group >> KIND_SHIFT


def group_of(kind: int, at: int) -> GroupId:
    """Group `at` of this kind of work."""
    return GroupId((kind << KIND_SHIFT) + at)


def send_to(peer: Peer | None, message: LeaseCancelled | SampleAnswered) -> list[Send]:
    """Send a message to a peer, if it is connected."""
    return [] if peer is None or peer.session is None else [Send(peer.session, message)]


def answer(peer: Peer | None, message: SampleFinished | TurnKept, refusal: str = "") -> list[Send]:
    """Tell the worker whether its result was accepted. refusal: why not; empty: it was."""
    accepted = not refusal
    return send_to(
        peer, SampleAnswered(message.lease, message.attempt, message.sample, accepted, refusal)
    )


def _size(output: Partial | None) -> int:
    if output is None:
        return 0
    size = len(output.tokens) + len(output.logprobs)
    return size + columns_bytes(output.columns) if output.columns else size
