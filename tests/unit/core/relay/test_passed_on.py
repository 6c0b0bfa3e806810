"""A relay's reports to its parent: how far it has passed a stripe on, and how many frames wait."""

import pytest

from echo2d.core.base.ids import PeerId
from echo2d.core.protocol.peer_messages import FramesPassed
from echo2d.core.relay.events import (
    Heard,
    LinkDown,
    LinkUp,
    PeerReady,
    RelayAction,
)
from echo2d.errors import PeerFault
from tests.support.relay_peer import FRAMES, LEFT, RIGHT, TABLE, UP, Edge, Peer, told

THIRD = PeerId("z")
CHILDREN = (LEFT, RIGHT, THIRD)


@pytest.fixture
def lonely(peer: Peer) -> Peer:
    """Follows UP; the first of its two stripes it shall pass on to three children, who are yet to come."""
    peer.plan((UP, CHILDREN), (UP, ()))
    assert reports(peer(LinkUp(UP))) == [(0, 0)]
    return peer


@pytest.fixture
def relay(lonely: Peer) -> Peer:
    """With its three children, who have the table."""
    for child in CHILDREN:
        lonely(LinkUp(child))
        lonely.asked(child, 2)
    lonely.comes(UP, 2, 0, TABLE)
    for child in CHILDREN:
        lonely(PeerReady(child))
    return lonely


def reports(actions: list[RelayAction]) -> list[tuple[int, int]]:
    """How far, and how many wait, as UP is told about stream 2."""
    passed = told(FramesPassed, actions)
    assert all((peer, message.stream) == (UP, 2) for peer, message in passed)
    return [(message.sequence, message.waiting) for _, message in passed]


def come(relay: Peer, *sequences: int) -> list[tuple[int, int]]:
    """These frames of the stripe come: what UP is told."""
    return [
        report
        for sequence in sequences
        for report in reports(relay.comes(UP, 2, sequence, FRAMES[sequence - 1]))
    ]


def test_a_relay_reports_how_far_its_median_child_was_given_the_stripe(relay: Peer) -> None:
    """Two frames are unsent at most: LEFT and RIGHT are given the first one, THIRD is not."""
    assert come(relay, 1) == [(2, 0)]


def test_a_relay_reports_how_many_frames_wait_for_its_median_child(relay: Peer) -> None:
    come(relay, 1, 2, 3, 4)
    assert reports(relay(PeerReady(LEFT))) == []
    assert reports(relay(PeerReady(RIGHT))) == []
    assert reports(relay(PeerReady(LEFT))) == [(3, 2)]


def test_a_relay_has_passed_on_no_more_than_any_relay_below_it(relay: Peer) -> None:
    relay(Heard(THIRD, FramesPassed(2, 0, 1)))
    assert come(relay, 1) == []
    for child in CHILDREN:
        relay(PeerReady(child))
    assert reports(relay(Heard(THIRD, FramesPassed(2, 2, 0)))) == [(2, 0)]


def test_frames_that_wait_at_a_relay_below_count(relay: Peer) -> None:
    come(relay, 1)
    for child in CHILDREN:
        relay(PeerReady(child))
    relay(Heard(THIRD, FramesPassed(2, 0, 2)))
    come(relay, 2)
    assert reports(relay(PeerReady(LEFT))) == []
    assert reports(relay(Heard(THIRD, FramesPassed(2, 1, 1)))) == []
    relay(PeerReady(RIGHT))
    assert reports(relay(Heard(THIRD, FramesPassed(2, 3, 0)))) == [(3, 0)]


def test_a_relay_that_waits_for_its_first_child_has_passed_nothing_on(lonely: Peer) -> None:
    lonely.comes(UP, 2, 0, TABLE)
    assert come(lonely, 1, 2, 3) == []
    lonely(LinkDown(UP, "reset"))
    passed = told(FramesPassed, lonely(LinkUp(UP)))
    assert [(message.sequence, message.waiting) for _, message in passed] == [(0, 0)]


def test_a_relay_whose_children_have_all_gone_has_passed_on_everything(relay: Peer) -> None:
    come(relay, 1, 2, 3)
    gone = [reports(relay(LinkDown(child, "reset"))) for child in CHILDREN]
    assert gone[-1] == [(4, 0)]
    assert come(relay, 4, 5) == [(5, 0), (6, 0)]


@pytest.mark.parametrize(
    ("edges", "spares"),
    [
        (((UP, (LEFT,)), (UP, ())), (0.0, 0.0)),
        (((UP, (LEFT, RIGHT)),), (0.0,)),
        (((UP, ()), (UP, ())), (0.0, 0.5)),
    ],
    ids=["a chain", "a stripe alone", "a leaf"],
)
def test_a_relay_that_need_not_be_waited_for_reports_nothing(
    peer: Peer, edges: tuple[Edge, ...], spares: tuple[float, ...]
) -> None:
    peer.plan(*edges, spares=spares)
    assert reports(peer(LinkUp(UP))) == []
    for child in edges[0][1]:
        peer(LinkUp(child))
        peer.asked(child, 2)
    assert reports(peer.comes(UP, 2, 0, TABLE)) == []
    assert come(peer, 1, 2) == []


def test_a_relay_of_one_child_reports_its_progress_beside_a_spare_stripe(peer: Peer) -> None:
    """Its root may send to both itself instead."""
    peer.plan((UP, (LEFT,)), (UP, ()), spares=(0.0, 0.5))
    peer(LinkUp(LEFT))
    peer.asked(LEFT, 2)
    assert reports(peer(LinkUp(UP))) == [(0, 0)]
    assert reports(peer.comes(UP, 2, 0, TABLE)) == [(1, 0)]


@pytest.mark.parametrize(
    ("sequence", "waiting"),
    [(2, 0), (1, 1), (0, 2), (1, -1), (-1, 2)],
    ids=["passed on", "together", "waiting", "fewer than none wait", "before the first"],
)
def test_a_relay_that_claims_more_than_it_got_is_at_fault(
    relay: Peer, sequence: int, waiting: int
) -> None:
    """LEFT has got the table."""
    with pytest.raises(PeerFault):
        relay(Heard(LEFT, FramesPassed(2, sequence, waiting)))
    relay.relay.check()


def test_a_child_from_elsewhere_may_know_more_of_the_stripe(relay: Peer) -> None:
    """It begins with frame 20, of which 15 wait there. Here no more can wait than have come."""
    come(relay, 1)
    relay.asked(RIGHT, 4, first=20)
    assert reports(relay(Heard(RIGHT, FramesPassed(4, 5, 15)))) == []
    for _ in range(2):
        for child in (LEFT, THIRD):
            relay(PeerReady(child))
    assert come(relay, 2)[-1] == (3, 0)
