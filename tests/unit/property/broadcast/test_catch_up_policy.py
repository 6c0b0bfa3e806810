"""Peers join, verify, fail and leave in any order while versions spread: each has a form that it can use, or waits."""

from hypothesis import given, settings
from hypothesis import strategies as st

from echo2d.core.base.ids import Epoch, PeerId, PublishSeq, SessionId
from echo2d.core.broadcast.catch_up_policy import CatchUpPolicy, DeltaRoute, choose_base
from echo2d.core.broadcast.transmission import Transmission
from echo2d.core.cluster.events import VersionPublished
from echo2d.core.cluster.peer import Peer
from echo2d.core.cluster.versions import PublishedVersions, key_of
from echo2d.core.weights.kept_deltas import KeptDelta, shortest_chain
from tests.support.coordinator_world import RULES, version_key

PEERS = 6
Step = tuple[str, int, int]

steps = st.lists(
    st.tuples(
        st.sampled_from(["stand", "lack", "verify", "leave", "publish", "give up", "end"]),
        st.integers(0, 5),
        st.integers(0, 9),
    ),
    max_size=60,
)


def a_worker(number: int) -> Peer:
    return Peer(PeerId(f"p{number}"), "p", "worker", "b", 1, SessionId(number), 0.0)


class Play:
    """A coordinator's peers and versions, in as far as catch-ups depend on them."""

    def __init__(self) -> None:
        self.versions = PublishedVersions([], PublishSeq(0))
        self.catch_ups = CatchUpPolicy(self.versions, self.begin)
        self.peers = [a_worker(number) for number in range(PEERS)]
        self.records: list[VersionPublished] = []
        self.main: Transmission | None = None
        self.publish()

    def begin(self, record: VersionPublished, way: DeltaRoute) -> Transmission:
        if way.via is not None:
            assert (
                shortest_chain(self.catch_ups.deltas, key_of(way.base).digest, record.digest)
                if way.base
                else False
            )
        return Transmission.start(
            record, RULES, lambda one, other: b"", now=0.0, base=way.base, via=way.via
        )

    def publish(self) -> None:
        number = len(self.records)
        key = version_key(number)
        record = VersionPublished(
            PublishSeq(number + 1), Epoch(1), key.version, key.digest, f"v/{number}", 1000
        )
        self.versions._take(record)
        self.records.append(record)
        older = [each for each in self.versions.copies() if each is not record]
        base = choose_base(older, self.peers)
        assert (
            base is None
            or 2 * sum(peer.engine.stands == key_of(base) for peer in self.peers) >= PEERS
        )
        self.main = self.begin(record, DeltaRoute(100, base))
        if base is not None:
            self.catch_ups.deltas = (
                *self.catch_ups.deltas,
                KeptDelta(base.digest, record.digest, 10),
            )[-8:]
        kept = [*self.catch_ups.paths(), *([] if base is None else [base.path])]
        self.versions.surplus(kept, bases=3, bytes_max=1 << 40)
        for peer in self.peers:
            self.catch_ups.assign(peer, self.main)

    def step(self, what: str, which: int, number: int) -> None:
        peer = self.peers[which]
        if what == "publish":
            self.publish()
            return
        if what == "give up":
            for spread in list(self.catch_ups)[:1]:
                self.catch_ups.give_up(spread)
                self.catch_ups.cannot_be_delta(spread.record)
        elif what == "end":
            for spread in self.catch_ups.idle():
                self.catch_ups.end(spread)
            for waiting in self.catch_ups.waiting():
                self.catch_ups.assign(self.peers[int(waiting[1:])], self.main)
        elif what == "leave":
            self.catch_ups.lost(peer.peer)
            return
        elif what == "lack":
            peer.engine.stands = None
        elif what == "stand":
            peer.engine.stands = key_of(self.records[number % len(self.records)])
        else:
            taken = self.catch_ups.takes(peer.peer) or self.main
            assert taken is not None
            peer.engine.stands = key_of(taken.record)
        self.catch_ups.assign(peer, self.main)

    def check(self) -> None:
        self.catch_ups.check()
        for peer in self.peers:
            taken = self.catch_ups.takes(peer.peer)
            if taken is not None and taken.base is not None:
                assert self.versions.live(key_of(taken.base)) is not None


@settings(deadline=None)
@given(steps)
def test_every_peer_has_a_form_that_it_can_use_or_waits(played: list[Step]) -> None:
    play = Play()
    for what, which, number in played:
        play.step(what, which, number)
        play.check()
        peer = play.peers[which]
        if what not in ("leave", "give up", "end", "publish"):
            taken = play.catch_ups.takes(peer.peer)
            usable = taken is not None and (
                taken.base is None or peer.engine.stands == key_of(taken.base)
            )
            assert (
                usable
                or play.catch_ups.is_settled(peer, play.main)
                or peer.peer in play.catch_ups.waiting()
            )
            assert taken is None or peer.engine.stands != key_of(taken.record), "it has that"
