"""Peers that can be dialled: all are tested, no claim is believed, and plans use the result."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain

import pytest

from echo2d.core.base.ids import PeerId, SessionId
from echo2d.core.cluster.events import DialBack, DialBackEnded, Note, PeerConnected, Send
from echo2d.core.cluster.membership import Membership
from echo2d.core.cluster.peer import Peer
from echo2d.core.cluster.reachability import (
    DIAL_BACK_EVERY_S,
    DIAL_BACK_S,
    DIALS_MAX,
    NO_ADDRESS,
    Reachability,
)
from echo2d.core.coordinator.events import CoordinatorAction
from echo2d.core.protocol.control_messages import Address, DialledBack, Hello, PlanEdges
from echo2d.core.protocol.peer_handshake import SECRET_BYTES
from tests.support.coordinator_world import World, rules
from tests.support.hello import HELLO

SECRET = bytes(SECRET_BYTES)
ANSWERS = replace(HELLO, dial_back_secret=SECRET)


class Club:
    """One peer and its hellos."""

    def __init__(self) -> None:
        self.members = Membership("r", heartbeat_s=2.0)
        self.reachability = Reachability(self.members)
        self.sessions = 0

    def hello(self, hello: Hello = ANSWERS, *, now: float = 0.0) -> Sequence[CoordinatorAction]:
        self.sessions += 1
        if self.sessions > 1:
            self.members.disconnected(SessionId(self.sessions - 1))
        joined, _ = self.members.connected(
            PeerConnected(SessionId(self.sessions), PeerId("a"), hello), now=now
        )
        assert joined is not None
        return self.checked(self.reachability.joined(joined.peer, now=now))

    def ended(
        self, fault: str = "", *, now: float = 0.0, session: int | None = None
    ) -> Sequence[CoordinatorAction]:
        event = DialBackEnded(SessionId(self.sessions if session is None else session), fault)
        return self.checked(self.reachability.ended(event, now=now))

    def pass_until(self, now: float) -> Sequence[CoordinatorAction]:
        return self.checked(self.reachability.deadlines(now=now))

    def checked(self, actions: Sequence[CoordinatorAction]) -> Sequence[CoordinatorAction]:
        self.members.check()
        self.reachability.check()
        return actions

    @property
    def peer(self) -> Peer:
        found = self.members.get(PeerId("a"))
        assert found is not None
        return found

    def address(self) -> Address | None:
        return self.peer.address


def told(actions: Iterable[CoordinatorAction]) -> list[str]:
    sent = [action.message for action in actions if isinstance(action, Send)]
    return [message.fault for message in sent if isinstance(message, DialledBack)]


def dialled(actions: Iterable[CoordinatorAction]) -> list[DialBack]:
    return [action for action in actions if isinstance(action, DialBack)]


def plan_of(world: World, name: str) -> PlanEdges:
    return [message for message in world.peers[name].inbox if isinstance(message, PlanEdges)][-1]


def test_a_peer_is_dialled_at_its_hello_and_has_an_address_if_it_answers() -> None:
    club = Club()
    assert dialled(club.hello()) == [DialBack(SessionId(1), PeerId("a"), Address("h", 1), SECRET)]
    assert (club.peer.reach.reachable, club.address()) == (None, None)
    actions = club.ended()
    assert told(actions) == [""]
    assert Note("dial_back", "box can be dialled") in actions
    assert (club.peer.reach.reachable, club.address()) == (True, Address("h", 1))


def test_a_peer_that_does_not_answer_has_no_address_and_gets_the_reason() -> None:
    club = Club()
    club.hello()
    actions = club.ended("h:1: no answer")
    assert told(actions) == ["h:1: no answer"]
    assert Note("dial_back", "box: h:1: no answer") in actions
    assert (club.peer.reach.reachable, club.address()) == (False, None)


@pytest.mark.parametrize(
    "hello", [replace(ANSWERS, listen=None), HELLO, replace(ANSWERS, dial_back_secret=b"short")]
)
def test_no_peer_without_an_address_or_a_secret_is_dialled(hello: Hello) -> None:
    club = Club()
    actions = club.hello(hello)
    assert (dialled(actions), told(actions)) == ([], [NO_ADDRESS])
    assert club.peer.reach.reachable is False
    assert club.reachability.wake_at() is None


def test_a_dial_is_tried_again_and_a_port_that_opens_or_closes_is_noticed() -> None:
    club = Club()
    club.hello()
    club.ended("no answer", now=1.0)
    assert club.reachability.wake_at() == 1.0 + DIAL_BACK_EVERY_S
    assert club.pass_until(DIAL_BACK_EVERY_S) == []
    assert len(dialled(club.pass_until(1.0 + DIAL_BACK_EVERY_S))) == 1
    assert club.reachability.wake_at() is None
    club.ended(now=130.0)
    assert club.address() is not None
    assert len(dialled(club.pass_until(130.0 + DIAL_BACK_EVERY_S))) == 1
    assert club.address() is not None  # until it is known that it is not
    actions = club.ended("no answer", now=300.0)
    assert club.address() is None
    assert told(actions) == ["no answer"]


def test_a_peer_is_dialled_once_at_a_time_however_often_it_says_hello() -> None:
    club = Club()
    actions = [club.hello(now=0.1 * second) for second in range(20)]
    assert len(dialled(chain(*actions))) == 1
    assert club.reachability.wake_at() == DIAL_BACK_S
    assert [one.session for one in dialled(club.pass_until(DIAL_BACK_S))] == [20]


def test_many_peers_are_dialled_a_few_at_a_time() -> None:
    club = Club()
    count = 2 * DIALS_MAX + 1
    for number in range(count):
        joined, _ = club.members.connected(
            PeerConnected(SessionId(number), PeerId(str(number)), ANSWERS), now=0.0
        )
        assert joined is not None
        assert len(dialled(club.reachability.joined(joined.peer, now=0.0))) == 1
        club.ended(session=number)
    turns = []
    while (wake_at := club.reachability.wake_at()) is not None:
        assert wake_at == DIAL_BACK_EVERY_S
        turns.append(len(dialled(club.pass_until(wake_at))))
    assert turns == [DIALS_MAX, DIALS_MAX, 1]


def test_an_answer_to_an_earlier_session_is_ignored() -> None:
    club = Club()
    club.hello()
    club.hello(replace(ANSWERS, listen=Address("h", 2)), now=1.0)
    assert club.ended(session=1, now=1.0) == []
    assert club.address() is None


def test_a_finding_is_kept_while_the_peer_listens_at_the_same_address() -> None:
    club = Club()
    club.hello()
    club.ended()
    club.hello(replace(ANSWERS, boot_id="next"), now=9.0)
    assert club.address() == Address("h", 1)
    club.hello(replace(ANSWERS, listen=Address("h", 2)), now=19.0)
    assert (club.peer.reach.reachable, club.address()) == (None, None)


def test_a_peer_that_is_away_is_not_dialled() -> None:
    club = Club()
    club.hello()
    club.ended()
    club.members.disconnected(SessionId(1))
    assert club.pass_until(DIAL_BACK_EVERY_S) == []
    assert club.reachability.wake_at() is None
    assert club.ended(session=1) == []


def test_the_address_of_the_seed_is_believed() -> None:
    club = Club()
    assert club.hello(replace(HELLO, kind="seed")) == []
    assert club.address() == Address("h", 1)


@pytest.mark.parametrize("shape", ["chain", "auto", "star"])
def test_two_peers_that_cannot_be_dialled_never_share_an_edge(shape: str) -> None:
    world = World(rules(shape=shape))
    world.closed = {"a", "c", "e"}
    for name in "abcdef":
        world.connect(name)
    world.connect("seed", kind="seed", slots=0)
    world.drain()
    world.open_session()
    world.publish(0)
    world.drain()
    reachable = {worker.name: worker.reachable for worker in world.state.status().workers}
    assert reachable == {name: name not in world.closed for name in "abcdef"}
    plans = {
        name: message
        for name in "abcdef"
        for message in world.peers[name].inbox
        if isinstance(message, PlanEdges)
    }
    for name in world.closed:
        assert not world.closed & {edge.peer for edge in plans[name].peers}
        assert all(edge.dial for edge in plans[name].peers)


def test_a_plan_does_not_wait_for_the_answer_to_a_dial() -> None:
    world = World(rules(shape="chain"))
    world.connect("seed", kind="seed", slots=0)
    for name in "ab":
        world.connect(name)
    late, world.pending = world.pending, []
    world.open_session()
    world.publish(0)
    world.drain()
    plan = plan_of(world, "a")
    assert [(edge.peer, edge.dial) for edge in plan.peers] == [("seed", True)]
    for event in late:
        world.handle(event)
    assert all(worker.reachable for worker in world.state.status().workers)


def test_a_peer_that_only_receives_has_no_children() -> None:
    world = World(rules(shape="auto"))
    world.receive_only = {"a", "b"}
    for name in "abc":
        world.connect(name)
    world.connect("seed", kind="seed", slots=0)
    world.drain()
    world.open_session()
    world.publish(0)
    world.drain()
    plans = {name: plan_of(world, name) for name in "abc"}
    assert not any(stripe.children for name in "ab" for stripe in plans[name].stripes)
