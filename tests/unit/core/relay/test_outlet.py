"""The outlet: which frame a peer sends next, over which of its links."""

import pytest

from echo2d.core.base.ids import FrameId, PeerId, SegmentId
from echo2d.core.protocol.peer_messages import FramesPassed, FramesWanted
from echo2d.core.relay.events import (
    FramesFound,
    Heard,
    LinkDown,
    LinkUp,
    PeerReady,
    RelayDeadlinePassed,
    TableHeld,
)
from echo2d.core.relay.outlet import SLOW_S, UNSENT_FRAMES
from tests.support.relay_peer import (
    FORM,
    FRAMES,
    LEFT,
    MANY,
    MANY_SIZES,
    RIGHT,
    TABLE,
    Peer,
    drain,
    fill,
    frames_to,
    sends,
)


@pytest.fixture
def both(peer: Peer) -> Peer:
    """The root of one stripe, which LEFT and RIGHT have asked for. Nothing is to be sent yet."""
    peer.plan((None, (LEFT, RIGHT)))
    for child in (LEFT, RIGHT):
        peer(LinkUp(child))
        peer.asked(child, 2)
    peer(TableHeld(FORM, SegmentId(0), MANY_SIZES))
    return peer


@pytest.fixture
def stuck(root: Peer) -> Peer:
    """LEFT was given two frames of which nothing is sent; RIGHT waits for its first one."""
    assert len(frames_to(LEFT, root.asked(LEFT, 2))) == UNSENT_FRAMES
    assert root.asked(RIGHT, 2) == []
    return root


def test_two_frames_are_unsent_over_all_links(both: Peer) -> None:
    assert len(sends(both(FramesFound(FORM, MANY)))) == UNSENT_FRAMES
    assert len(sends(both(PeerReady(LEFT)))) == 1
    assert len(sends(both(PeerReady(RIGHT)))) == 1


def test_children_of_one_stripe_advance_in_turn(both: Peer) -> None:
    sent = [*sends(both(FramesFound(FORM, MANY[:4]))), *drain(both, LEFT, RIGHT)]
    assert [(action.peer, action.frame) for action in sent] == [
        (child, frame) for frame in (TABLE, *MANY[:4]) for child in (LEFT, RIGHT)
    ]


def test_a_lost_link_makes_room(stuck: Peer) -> None:
    assert frames_to(RIGHT, stuck(LinkDown(LEFT, "reset"))) == [TABLE, FRAMES[0]]


# links that are slow


def test_a_link_that_takes_nothing_for_a_while_no_longer_counts(stuck: Peer) -> None:
    assert frames_to(RIGHT, stuck(RelayDeadlinePassed(), after=SLOW_S - 0.01)) == []
    assert frames_to(RIGHT, stuck(RelayDeadlinePassed(), after=0.02)) == [TABLE, FRAMES[0]]


def test_the_relay_wakes_up_when_a_stuck_link_stops_counting(stuck: Peer) -> None:
    assert stuck.relay.wake_at() == stuck.now + SLOW_S


def test_a_slow_link_gets_no_frame_before_it_has_sent_one(stuck: Peer) -> None:
    stuck(RelayDeadlinePassed(), after=SLOW_S)
    assert {action.peer for action in drain(stuck, RIGHT)} == {RIGHT}
    assert frames_to(LEFT, stuck(PeerReady(LEFT))) == list(FRAMES[1:3])


def test_a_slow_link_that_has_room_for_a_frame_gets_none_either(both: Peer) -> None:
    """LEFT and RIGHT were given one each. RIGHT alone takes it, and that late."""
    both(FramesFound(FORM, MANY))
    assert both(RelayDeadlinePassed(), after=SLOW_S) == []
    assert {action.peer for action in drain(both, RIGHT)} == {RIGHT}


def test_a_slow_link_counts_again_when_it_has_sent(stuck: Peer) -> None:
    stuck(RelayDeadlinePassed(), after=SLOW_S)
    drain(stuck, RIGHT)
    wants = Heard(RIGHT, FramesWanted(4, FORM, FRAMES[:1]))
    assert frames_to(RIGHT, stuck(wants)) == [FRAMES[0]]
    stuck(PeerReady(RIGHT))
    assert frames_to(LEFT, stuck(PeerReady(LEFT))) == list(FRAMES[1:3])
    assert stuck(wants) == []


def test_a_link_gets_more_time_if_frames_usually_take_long(both: Peer) -> None:
    """The uplink is slow, and not one link: four times the usual time counts."""
    both(FramesFound(FORM, MANY[:30]))
    for _ in range(40):
        both(PeerReady(LEFT), after=0.1)
        both(PeerReady(RIGHT), after=0.1)
    both(LinkDown(RIGHT, "reset"))
    both(FramesFound(FORM, MANY[30:]))
    both(LinkUp(RIGHT))
    both.asked(RIGHT, 4)
    assert frames_to(RIGHT, both(RelayDeadlinePassed(), after=0.7)) == []
    assert frames_to(RIGHT, both(RelayDeadlinePassed(), after=0.2)) == [TABLE, MANY[0]]


# what is first


def test_stripes_are_sent_before_single_frames_and_single_frames_before_the_spare_stripe(
    peer: Peer,
) -> None:
    fill(peer)
    peer.plan((None, (LEFT,)), (None, (RIGHT,)), spares=(0.0, 1.0))
    peer(LinkUp(LEFT))
    peer(LinkUp(RIGHT))
    assert frames_to(LEFT, peer.asked(LEFT, 2, 0)) == [TABLE, FRAMES[0]]
    peer(Heard(LEFT, FramesPassed(2, 0, 0)))
    peer.asked(RIGHT, 2, 1)
    peer(Heard(RIGHT, FramesWanted(4, FORM, FRAMES[-1:])))
    sent = [*sends(peer(PeerReady(LEFT))), *drain(peer, RIGHT)]
    assert [(action.peer, action.stream, action.frame) for action in sent[:4]] == [
        (LEFT, 2, FRAMES[1]),
        (RIGHT, 4, FRAMES[-1]),
        (RIGHT, 2, TABLE),
        (RIGHT, 2, FRAMES[2]),
    ]


def test_peers_that_ask_for_single_frames_are_served_in_turn(root: Peer) -> None:
    def asks(peer: PeerId, frames: tuple[FrameId, ...]) -> list[FrameId]:
        actions = root(Heard(peer, FramesWanted(2, FORM, frames)))
        return [action.frame for action in sends(actions)]

    assert asks(LEFT, FRAMES[:4]) == list(FRAMES[:2])
    assert asks(RIGHT, FRAMES[4:6]) == []
    sent = [*sends(root(PeerReady(LEFT))), *drain(root, LEFT, RIGHT)]
    assert [(action.peer, action.frame) for action in sent] == [
        (LEFT, FRAMES[2]),
        (RIGHT, FRAMES[4]),
        (LEFT, FRAMES[3]),
        (RIGHT, FRAMES[5]),
    ]


# how long the uplink was busy


def test_the_uplink_is_busy_from_the_first_frame_until_the_last_one_is_sent(both: Peer) -> None:
    both(FramesFound(FORM, MANY[:1]), after=1.0)
    both(PeerReady(LEFT), after=0.1)
    both(PeerReady(RIGHT), after=0.1)
    both(PeerReady(LEFT), after=0.1)
    both(PeerReady(RIGHT), after=0.1)
    assert both.relay.busy.take(both.now + 5.0) == pytest.approx(0.4)


def test_the_uplink_is_not_busy_with_what_a_slow_link_does_not_take(both: Peer) -> None:
    both(LinkDown(RIGHT, "reset"))
    both(FramesFound(FORM, MANY))
    both(RelayDeadlinePassed(), after=SLOW_S)
    assert both.relay.busy.take(both.now + 5.0) == pytest.approx(SLOW_S)
