"""The scheduler with kinds of work that are only queues: order, versions, workers."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from echo2d.core.base.ids import Epoch, PeerId, PublishSeq, SessionId, Version
from echo2d.core.cluster.events import PeerConnected, Send, VersionPublished
from echo2d.core.cluster.membership import Membership
from echo2d.core.cluster.parts import RunParts
from echo2d.core.cluster.peer import Peer
from echo2d.core.cluster.statistics import Statistics
from echo2d.core.cluster.versions import PublishedVersions
from echo2d.core.protocol.control_messages import (
    PROGRESS_S,
    HeldLease,
    LeaseProgress,
    SampleDelta,
    SampleFinished,
    VersionSpan,
)
from echo2d.core.work.deliveries import RANK_SLOW, TRIAL_S
from echo2d.core.work.kind import Cause, KindOfWork, PendingSamples
from echo2d.core.work.leases import Lease, group_of
from echo2d.core.work.scheduler import LATELY_S, LeaseScheduler
from tests.support.coordinator_world import RULES, version_key
from tests.support.hello import HELLO


class Queue(KindOfWork[PendingSamples]):
    """A kind of work that waits in a list; granted: (worker, samples) in their order. lost: (worker, cause). room: in
    tokens.
    """

    def __init__(
        self, number: int, *waiting: PendingSamples, priority: int = 0, room: int = 8
    ) -> None:
        self.number = number
        self.scheduler: LeaseScheduler
        self.waiting, self._priority = list(waiting), priority
        self.granted: list[tuple[str, tuple[int, ...]]] = []
        self.lost_by: list[tuple[str, str]] = []
        self._room = room

    def priority(self, *, now: float) -> int:
        return self._priority

    def pending(self, *, now: float) -> Iterator[PendingSamples]:
        yield from list(self.waiting)

    def grant(
        self, pending: PendingSamples, worker: Peer, samples: Sequence[int], *, now: float
    ) -> list[Send]:
        assert worker.engine.serving is not None
        group = group_of(self.number, 0)
        lease = self.scheduler.leases.start(
            None, group, worker.peer, worker.engine.serving, samples, room=self._room, now=now
        )
        lease.named = pending.named
        self.granted.append((worker.name, tuple(samples)))
        if pending in self.waiting:
            self.waiting.remove(pending)
        return []

    def finished(
        self, peer: Peer, lease: Lease | None, message: SampleFinished, *, now: float
    ) -> None:
        return None

    def lost(self, lease: Lease, cause: Cause, reason: str, *, now: float) -> list[Send]:
        self.lost_by.append((str(lease.worker), cause))
        return []

    def check(self) -> None:
        assert len(self.granted) >= self.scheduler.leases.count(self.number)


def record_of(number: int) -> VersionPublished:
    digest = version_key(number).digest
    return VersionPublished(PublishSeq(number + 1), Epoch(1), Version(number), digest, "p", 1)


class Fleet:
    """Workers by their names: (slots, the version that it serves). most: as in `RunRules.versions_held`."""

    def __init__(self, workers: dict[str, tuple[int, int]], *kinds: Queue, most: int = 1) -> None:
        rules = replace(RULES, versions_held=most)
        self.members = Membership(rules.run_id, rules.heartbeat_s, versions_held=most)
        published = [record_of(number) for number in range(3)]
        self.versions = PublishedVersions(published, PublishSeq(3))
        self.statistics = Statistics()
        parts = RunParts(rules, self.members, self.versions, self.statistics)
        self.scheduler = LeaseScheduler(parts, tag=1)
        for kind in kinds:
            kind.scheduler = self.scheduler
            self.scheduler.add(kind)
        for name, (slots, version) in workers.items():
            self.add(name, slots, version)

    def add(self, name: str, slots: int, version: int = 0) -> None:
        hello = replace(HELLO, run_id=None, name=name, slots=slots, serving=version_key(version))
        number = SessionId(len(list(self.members)))
        joined, _ = self.members.connected(PeerConnected(number, PeerId(name), hello), now=0.0)
        assert joined is not None

    def serve(self, name: str, version: int, *beside: int) -> None:
        """beside: the versions that it holds, too."""
        peer = self.members.get(PeerId(name))
        assert peer is not None
        for each in beside:
            peer.engine.serves(version_key(each))
        peer.engine.serves(version_key(version), [*map(version_key, beside)])
        self.members.changed.add(peer.peer)

    def fill(self) -> None:
        self.scheduler.fill(now=0.0)
        self.scheduler.check()


def one(oldest: int = 0, preferred: str | None = None) -> PendingSamples:
    return PendingSamples((0,), Version(oldest), None if preferred is None else PeerId(preferred))


def named(version: int, preferred: str | None = None) -> PendingSamples:
    """A sample that this version alone may write."""
    newest, key = Version(version), version_key(version)
    return replace(one(version, preferred), newest=newest, named=key)


def group(samples: int, oldest: int = 0) -> PendingSamples:
    return PendingSamples(range(samples), Version(oldest))


def test_the_kind_with_the_smallest_priority_is_served_first() -> None:
    run, urgent = Queue(0, one(), one()), Queue(1, one(), priority=-1)
    Fleet({"a": (2, 0)}, run, urgent).fill()
    assert (len(run.granted), len(urgent.granted)) == (1, 1)


def test_a_kind_that_cannot_be_placed_does_not_delay_the_others() -> None:
    run, newer = Queue(0, one(), group(2, oldest=2)), Queue(1, one(2), one(2))
    any_version = Queue(2, one(1), one())
    Fleet({"a": (2, 0)}, run, newer, any_version).fill()
    assert (run.granted, newer.granted) == ([("a", (0,))], [])
    assert (any_version.granted, any_version.waiting) == ([("a", (0,))], [one(1)])


def test_a_sample_goes_first_to_the_newest_version_and_then_to_the_most_free_slots() -> None:
    run = Queue(0, one(), one(), one(1), one(1))
    Fleet({"old": (9, 0), "new": (1, 2), "small": (1, 1), "large": (2, 1)}, run).fill()
    assert [worker for worker, _ in run.granted] == ["new", "large", "large", "small"]


def test_a_sample_goes_to_its_preferred_worker_if_that_may_write_it() -> None:
    run = Queue(0, one(preferred="old"), one(preferred="old"), one(1, preferred="old"))
    Fleet({"old": (1, 0), "new": (9, 2)}, run).fill()
    assert [worker for worker, _ in run.granted] == ["old", "new", "new"]


def test_a_preferred_worker_with_a_version_that_is_too_new_is_skipped() -> None:
    exact = PendingSamples((0,), Version(1), PeerId("new"), newest=Version(1))
    run = Queue(0, exact, exact)
    Fleet({"old": (9, 0), "right": (1, 1), "new": (9, 2)}, run).fill()
    assert (run.granted, run.waiting) == ([("right", (0,))], [exact])


def test_a_worker_that_does_not_suit_a_sample_is_skipped() -> None:
    suits = PendingSamples((0,), Version(0), PeerId("a"), lambda worker: worker != "a")
    run = Queue(0, suits, suits)
    Fleet({"a": (9, 2), "b": (1, 0)}, run).fill()
    assert (run.granted, run.waiting) == ([("b", (0,))], [suits])


def test_slots_that_another_kind_holds_are_not_free_for_the_run() -> None:
    run, other = Queue(0, group(4), priority=1), Queue(1, one())
    fleet = Fleet({"a": (3, 0)}, run, other)
    fleet.fill()
    assert (other.granted, fleet.scheduler.slots) == ([("a", (0,))], 2)
    assert [samples for _, samples in run.granted] == [(0, 1)], "the others wait for the next slots"


def test_a_sample_that_names_its_version_goes_to_a_worker_that_holds_it() -> None:
    run = Queue(0, one(2), named(2), named(0, "b"), named(0), named(1, "b"))
    fleet = Fleet({"a": (2, 1), "b": (9, 1)}, run, most=3)
    fleet.serve("a", 1, 0, 2)
    fleet.fill()
    assert run.granted == [("a", (0,)), ("a", (0,)), ("b", (0,))]
    assert run.waiting == [one(2), named(0)]


def test_several_samples_that_name_their_version_are_placed_together() -> None:
    run = Queue(0, replace(named(0), samples=(0, 1, 2)))
    fleet = Fleet({"a": (2, 1), "b": (2, 1), "c": (9, 1)}, run, most=2)
    for name in "ab":
        fleet.serve(name, 1, 0)
    fleet.fill()
    assert run.granted == [("a", (0, 1)), ("b", (2,))]


class Timed(Fleet):
    """Two fast workers and a slow one, which write what a test says in each PROGRESS_S."""

    def __init__(self, run: Queue, most: int = 1, **slots: int) -> None:
        super().__init__({name: (count, 0) for name, count in slots.items()}, run, most=most)
        self.run, self.now = run, 0.0
        # A lease of which nothing is written.
        self.alone: HeldLease | None = None

    def play(self, seconds: float, **tokens: int) -> None:
        """tokens: of each lease, in each PROGRESS_S."""
        for _ in range(round(seconds / PROGRESS_S)):
            self.now += PROGRESS_S
            for lease in list(self.scheduler.leases):
                peer = self.members.get(lease.worker)
                assert peer is not None
                written = max([0, *lease.longest.values()])
                new = 0 if lease.key == self.alone else tokens.get(peer.name, 0)
                span = VersionSpan(0, written + new, *version_key(0))
                delta = SampleDelta(0, bytes(4 * (written + new)), b"", (span,))
                deltas = (delta,) if new and written + new <= lease.room else ()
                message = LeaseProgress(lease.key.lease, lease.key.attempt, deltas)
                self.scheduler.progressed(peer, message, now=self.now)
            self.scheduler.fill(now=self.now)
            self.scheduler.check()


def test_samples_of_a_slow_worker_move_once_a_faster_worker_has_free_slots() -> None:
    run = Queue(0, *[one(preferred=name) for name in ("slow", "a", "b")], room=1000)
    fleet = Timed(run, a=1, b=1, slow=64)
    fleet.fill()
    assert sorted(name for name, _ in run.granted) == ["a", "b", "slow"]
    fleet.play(20.0, a=20, b=20, slow=1)
    assert run.lost_by == [], "no other slot is free"
    fleet.add("c", 2)
    fleet.play(10.0, a=20, b=20, slow=1)
    assert run.lost_by == [("slow", "late")]


def test_samples_that_name_their_version_move_only_to_a_worker_that_holds_it() -> None:
    run = Queue(0, named(0, "slow"), one(preferred="a"), one(preferred="b"), room=1000)
    fleet = Timed(run, most=2, a=1, b=1, slow=64)
    fleet.serve("slow", 1, 0)
    fleet.fill()
    fleet.add("c", 2, 1)
    fleet.play(30.0, a=20, b=20, slow=1)
    assert run.lost_by == []
    fleet.serve("c", 1, 0)
    fleet.play(10.0, a=20, b=20, slow=1)
    assert run.lost_by == [("slow", "late")]


@pytest.mark.parametrize("again", [False, True])
def test_samples_that_a_fast_worker_neglects_move_to_another(again: bool) -> None:
    """Once may be an accident; then what it wrote before still says how fast it is."""
    run = Queue(0, *[one(preferred=name) for name in ("a", "a", "b")], room=1000)
    fleet = Timed(run, a=2, b=2)
    peer = fleet.members.get(PeerId("a"))
    assert peer is not None
    peer.service.failures = 2.0 * again
    fleet.play(4.0, a=20, b=20)
    fleet.scheduler.deliveries.wrote(PeerId("a"), 0, answer=40)
    alone = fleet.alone = next(lease.key for lease in fleet.scheduler.leases if lease.worker == "a")
    fleet.play(TRIAL_S - PROGRESS_S, a=20, b=20)
    assert run.lost_by == []
    fleet.play(2 * PROGRESS_S, a=20, b=20)
    assert run.lost_by == [("a", "late")]
    assert fleet.scheduler.leases.get(alone) is None
    assert peer.service.rest_until >= fleet.now - PROGRESS_S + TRIAL_S
    assert (fleet.scheduler.deliveries.bounds(PeerId("a")) == (1, RANK_SLOW)) == again


def test_a_refit_of_usual_length_does_not_count_as_a_standstill() -> None:
    run = Queue(0, *[one(preferred=name) for name in ("a", "b")], room=1000)
    fleet = Timed(run, a=2, b=2)
    for name in ("a", "b"):
        peer = fleet.members.get(PeerId(name))
        assert peer is not None
        peer.engine.refit_pause_s = 2 * TRIAL_S
        fleet.statistics.paused(2 * TRIAL_S)
    fleet.play(4.0, a=20, b=20)
    fleet.alone = next(lease.key for lease in fleet.scheduler.leases if lease.worker == "a")
    fleet.play(2 * TRIAL_S, a=20, b=20)
    assert run.lost_by == []
    fleet.play(2 * PROGRESS_S, a=20, b=20)
    assert run.lost_by == [("a", "late")]


@pytest.mark.parametrize("slow", [8, 20])
def test_a_worker_that_is_not_much_slower_keeps_what_it_holds(slow: int) -> None:
    run = Queue(0, *[one(preferred=name) for name in ("slow", "a", "b")], room=1000)
    fleet = Timed(run, a=2, b=2, slow=2)
    fleet.play(40.0, a=20, b=20, slow=slow)
    assert run.lost_by == []


def test_a_slow_worker_waits_for_fast_ones_that_do_not_serve_a_new_version_yet() -> None:
    run = Queue(0, one(preferred="slow"), one(preferred="a"), room=1000)
    fleet = Timed(run, a=2, slow=64)
    fleet.play(20.0, a=20, slow=1)
    fleet.serve("a", 2)
    fleet.versions._take(record_of(3))
    fleet.serve("slow", 3)
    run.waiting.append(one(oldest=3))
    fleet.scheduler.fill(now=fleet.now)
    assert len(run.granted) == 2
    fleet.now += LATELY_S
    fleet.scheduler.fill(now=fleet.now)
    assert run.granted[2] == ("slow", (0,)), "the fast one does not come"
