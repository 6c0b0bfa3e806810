"""The ranking of workers equals a new sorting of all of them, after any changes."""

import random

import pytest

from echo2d.core.base.ids import Epoch, PeerId, PublishSeq, SessionId, Version
from echo2d.core.cluster.events import VersionPublished
from echo2d.core.cluster.peer import Peer, PeerEngine
from echo2d.core.protocol.control_messages import VersionKey
from echo2d.core.work.ranking import (
    FreeSlots,
    WorkerChoice,
    WorkerRanking,
    WorkersByVersion,
    _Row,
)
from tests.support.coordinator_world import version_key

VERSIONS = {
    version_key(number): VersionPublished(
        PublishSeq(seq), Epoch(1), Version(number), version_key(number).digest, "p", 1
    )
    for number, seq in ((0, 5), (1, 2), (2, 3))  # version 0 was published again
}
SERVED = (None, *VERSIONS, version_key(9))  # the last one is revoked


def worker(name: str, *, slots: int = 4, serving: VersionKey | None = None) -> Peer:
    return Peer(
        PeerId(name), name, "worker", "boot", slots, SessionId(1), 0.0, engine=PeerEngine(serving)
    )


class Fleet:
    """Workers and their loads, ranked."""

    def __init__(self) -> None:
        self.ranking = WorkerRanking(several=True)
        self.peers: dict[PeerId, Peer] = {}
        self.load: dict[PeerId, int] = {}
        self.bounds: dict[PeerId, tuple[int, int]] = {}
        self.now = 0.0

    def put(self, peer: Peer, load: int = 0, *, allowed: int = 4, rank: int = 0) -> None:
        self.peers[peer.peer], self.load[peer.peer] = peer, load
        self.bounds[peer.peer] = allowed, rank
        self.refresh(self.ranking, peer.peer)

    def refresh(self, ranking: WorkerRanking, worker: PeerId) -> None:
        ranking.refresh(worker, self.peers[worker], self.load[worker], 0, self.bounds[worker])

    def choose(self, oldest: int) -> WorkerChoice:
        self.ranking.rested(now=self.now)
        self.ranking.check(self.peers, self.refresh)
        return self.ranking.choose(Version(oldest), VERSIONS.get)

    def sorted_holders(self, named: VersionKey) -> list[FreeSlots]:
        """Those that hold this version: the fastest first, then most room."""
        ranked = []
        for peer in self.peers.values():
            holds = peer.alive and named in peer.engine.held
            if holds and self.now >= peer.service.rest_until:
                allowed, rank = self.bounds[peer.peer]
                slots = min(peer.slots, allowed)
                ranked.append((rank, self.load[peer.peer] - slots, peer.peer, slots))
        return [
            FreeSlots(name, slots, -full) for _, full, name, slots in sorted(ranked) if full < 0
        ]

    def sorted_rooms(self, oldest: int) -> list[FreeSlots]:
        """As the rule says it: newest publish first, then the fastest, then most room."""
        ranked = []
        for peer in self.peers.values():
            record = None if peer.engine.serving is None else VERSIONS.get(peer.engine.serving)
            if (
                peer.alive
                and record is not None
                and record.version >= oldest
                and self.now >= peer.service.rest_until
            ):
                allowed, rank = self.bounds[peer.peer]
                slots = min(peer.slots, allowed)
                free = max(0, slots - self.load[peer.peer])
                ranked.append((-record.publish_seq, rank, -free, peer.peer, slots))
        return [FreeSlots(name, slots, -free) for *_, free, name, slots in sorted(ranked)]


def test_workers_with_the_newest_publish_and_the_most_room_rank_first() -> None:
    fleet = Fleet()
    for name, version, load in (("a", 2, 0), ("b", 0, 3), ("c", 0, 1), ("d", 1, 0), ("e", 0, 4)):
        fleet.put(worker(name, serving=version_key(version)), load)
    assert [room.worker for room in fleet.choose(0)] == ["c", "b", "a", "d"]
    assert [room.worker for room in fleet.choose(1)] == ["a", "d"]
    assert (fleet.choose(0).free, fleet.choose(0).slots, fleet.ranking.slots) == (12, 20, 20)


def test_the_fastest_workers_rank_first_and_a_slow_one_gets_the_rest() -> None:
    fleet = Fleet()
    for name, load, allowed, rank in (("slow", 0, 4, 2), ("fast", 2, 4, -1), ("bound", 0, 1, 0)):
        fleet.put(worker(name, serving=version_key(0)), load, allowed=allowed, rank=rank)
    assert [(room.worker, room.free) for room in fleet.choose(0)] == [
        ("fast", 2),
        ("bound", 1),
        ("slow", 4),
    ]
    assert fleet.choose(0).place(range(3)) == [("fast", (0, 1)), ("bound", (2,))]
    assert fleet.choose(0).place(range(2)) == [("fast", (0, 1))]


def test_a_worker_that_rests_is_ranked_again_in_time() -> None:
    fleet = Fleet()
    peer = worker("a", serving=version_key(0))
    fleet.put(peer)
    peer.service.rest(fleet.now, at_least_s=8.0)
    fleet.put(peer)
    assert (list(fleet.choose(0)), fleet.ranking.wake_at()) == ([], 8.0)
    fleet.now = 8.0
    assert ([room.worker for room in fleet.choose(0)], fleet.ranking.wake_at()) == (["a"], None)


def test_the_ranking_agrees_with_sorting_all_workers() -> None:
    rng = random.Random(11)
    fleet = Fleet()
    for _ in range(1500):
        fleet.now += rng.choice((0.0, 0.3, 1.1))
        name = f"w{rng.randrange(9)}"
        peer = fleet.peers.get(PeerId(name)) or worker(name)
        peer.slots, peer.engine.serving = rng.randrange(5), rng.choice(SERVED)
        peer.engine.beside = frozenset(rng.sample([*VERSIONS], rng.randrange(3)))
        peer.state = rng.choice(("joined", "joined", "suspected"))
        if rng.random() < 0.2:
            peer.service.rest(fleet.now)
        fleet.put(peer, rng.randrange(6), allowed=rng.randrange(6), rank=rng.randrange(-1, 2))
        oldest, samples = rng.randrange(3), range(rng.randrange(1, 12))
        choice, rooms = fleet.choose(oldest), fleet.sorted_rooms(oldest)
        assert list(choice) == [room for room in rooms if room.free]
        assert (choice.free, choice.slots) == (
            sum(r.free for r in rooms),
            sum(r.slots for r in rooms),
        )
        placed = [sample for _, part in choice.place(samples) for sample in part]
        assert placed == list(samples[: choice.free])
        named = version_key(oldest)
        assert list(fleet.ranking.choose_holders(named)) == fleet.sorted_holders(named)


def test_without_several_versions_no_holders_are_ranked() -> None:
    ranking = WorkerRanking()
    peer = worker("a", serving=version_key(0))
    ranking.refresh(peer.peer, peer, 0)
    assert list(ranking.choose_holders(version_key(0))) == []
    assert not ranking._holders


def version_of(worker: PeerId, slots: int, free: int) -> WorkersByVersion:
    workers = WorkersByVersion()
    workers.put(worker, _Row(None, frozenset(), slots, 0.0, 0, free))
    return workers


def choice_of(sizes: list[tuple[int, int]]) -> WorkerChoice:
    """Workers with these slots and free slots; the first one serves the newest version, and so on."""
    versions = [
        version_of(PeerId(f"w{index}"), slots, free) for index, (slots, free) in enumerate(sizes)
    ]
    return WorkerChoice(versions)


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ([(8, 8), (8, 8)], {"w0": 4}),  # the best has room
        ([(8, 2), (8, 5)], {"w1": 4}),  # another one has room for all
        ([(8, 3), (8, 2)], {"w0": 3, "w1": 1}),  # only together
        ([(8, 3), (8, 1), (8, 2)], {"w0": 3, "w1": 1}),  # nobody beyond those that are needed
        ([(8, 3)], {"w0": 3}),  # the last one waits for the next slot
        ([(2, 1), (1, 1)], {"w0": 1, "w1": 1}),
        ([], {}),
    ],
)
def test_samples_are_placed_together_if_a_worker_has_room(
    sizes: list[tuple[int, int]], parts: dict[str, int]
) -> None:
    placed = choice_of(sizes).place(range(4))
    assert [sample for _, samples in placed for sample in samples] == list(
        range(sum(parts.values()))
    )
    assert {worker: len(samples) for worker, samples in placed} == parts
