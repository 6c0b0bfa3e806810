"""The scheduler with kinds of work that are nothing but queues: order, versions, workers."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from echo2d.core.base.ids import Epoch, GroupId, PeerId, PublishSeq, SessionId, Version
from echo2d.core.cluster.events import PeerConnected, Send, VersionPublished
from echo2d.core.cluster.membership import Membership, Peer
from echo2d.core.cluster.statistics import Statistics
from echo2d.core.cluster.versions import PublishedVersions
from echo2d.core.rollouts.leases import LeaseTable
from echo2d.core.rollouts.scheduler import LeaseScheduler, PendingSamples
from tests.support.coordinator_world import RULES, version_key
from tests.support.hello import HELLO


class Queue:
    """A kind of work that waits in a list; granted: (worker, samples) in their order."""

    def __init__(self, tag: int, *waiting: PendingSamples, priority: int = 0) -> None:
        self.leases = LeaseTable(tag, silence_s=15.0)
        self.waiting, self._priority = list(waiting), priority
        self.granted: list[tuple[str, tuple[int, ...]]] = []

    def priority(self, *, now: float) -> int:
        return self._priority

    def pending(self, *, now: float) -> Iterator[PendingSamples]:
        yield from list(self.waiting)

    def grant(
        self, pending: PendingSamples, worker: Peer, samples: Sequence[int], *, now: float
    ) -> list[Send]:
        assert worker.serving is not None
        self.leases.start(None, GroupId(0), worker.peer, worker.serving, samples, now=now)
        self.granted.append((worker.name, tuple(samples)))
        if pending in self.waiting:
            self.waiting.remove(pending)
        return []


class Fleet:
    """Workers by their names: (slots, the version that it serves)."""

    def __init__(self, workers: dict[str, tuple[int, int]], *kinds: Queue) -> None:
        self.members = Membership(RULES.run_id, RULES.heartbeat_s)
        published = [
            VersionPublished(
                PublishSeq(number + 1),
                Epoch(1),
                Version(number),
                version_key(number).digest,
                "p",
                1,
            )
            for number in range(3)
        ]
        self.scheduler = LeaseScheduler(
            members=self.members,
            versions=PublishedVersions(published, PublishSeq(3)),
            statistics=Statistics(),
        )
        for kind in kinds:
            self.scheduler.add(kind)
        for number, (name, (slots, version)) in enumerate(workers.items()):
            hello = replace(
                HELLO, run_id=None, name=name, slots=slots, serving=version_key(version)
            )
            event = PeerConnected(SessionId(number), PeerId(name), hello)
            joined, _ = self.members.connected(event, now=0.0)
            assert joined is not None

    def fill(self) -> None:
        self.scheduler.fill(now=0.0)
        self.scheduler.check()


def one(oldest: int = 0, preferred: str | None = None) -> PendingSamples:
    return PendingSamples((0,), Version(oldest), None if preferred is None else PeerId(preferred))


def group(samples: int, oldest: int = 0) -> PendingSamples:
    return PendingSamples(range(samples), Version(oldest))


def test_the_kind_with_the_smallest_priority_is_served_first() -> None:
    run, urgent = Queue(1, one(), one()), Queue(2, one(), priority=-1)
    Fleet({"a": (2, 0)}, run, urgent).fill()
    assert (len(run.granted), len(urgent.granted)) == (1, 1)


def test_a_kind_that_cannot_be_placed_does_not_hold_up_the_others() -> None:
    run, newer = Queue(1, one(), group(2, oldest=2)), Queue(2, one(2), one(2))
    any_version = Queue(3, one(1), one())
    Fleet({"a": (2, 0)}, run, newer, any_version).fill()
    assert (run.granted, newer.granted) == ([("a", (0,))], [])
    assert (any_version.granted, any_version.waiting) == ([("a", (0,))], [one(1)])


def test_a_sample_goes_to_the_newest_version_then_to_the_most_free_slots() -> None:
    run = Queue(1, one(), one(), one(1), one(1))
    Fleet({"old": (9, 0), "new": (1, 2), "small": (1, 1), "large": (2, 1)}, run).fill()
    assert [worker for worker, _ in run.granted] == ["new", "large", "large", "small"]


def test_a_sample_goes_to_its_preferred_worker_if_that_may_write_it() -> None:
    run = Queue(1, one(preferred="old"), one(preferred="old"), one(1, preferred="old"))
    Fleet({"old": (1, 0), "new": (9, 2)}, run).fill()
    assert [worker for worker, _ in run.granted] == ["old", "new", "new"]


def test_a_preferred_worker_of_a_version_that_is_too_new_is_passed_over() -> None:
    exact = PendingSamples((0,), Version(1), PeerId("new"), newest=Version(1))
    run = Queue(1, exact, exact)
    Fleet({"old": (9, 0), "right": (1, 1), "new": (9, 2)}, run).fill()
    assert (run.granted, run.waiting) == ([("right", (0,))], [exact])


def test_a_worker_that_does_not_suit_a_sample_is_passed_over() -> None:
    suits = PendingSamples((0,), Version(0), PeerId("a"), lambda worker: worker != "a")
    run = Queue(1, suits, suits)
    Fleet({"a": (9, 2), "b": (1, 0)}, run).fill()
    assert (run.granted, run.waiting) == ([("b", (0,))], [suits])


def test_slots_that_another_kind_holds_are_not_there_for_the_run() -> None:
    run, other = Queue(1, group(4), priority=1), Queue(2, one())
    fleet = Fleet({"a": (3, 0)}, run, other)
    fleet.fill()
    assert (other.granted, fleet.scheduler.slots) == ([("a", (0,))], 2)
    assert [samples for _, samples in run.granted] == [(0, 1)], "the others wait for the next slots"
