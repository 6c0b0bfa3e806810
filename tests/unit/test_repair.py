"""Frames outside the stripes: who is asked, what is answered, what is taken back."""

import pytest

from echo2d.core.ids import SegmentId, frame_id
from echo2d.core.relay_io import (
    DONE,
    Accuse,
    CancelHeard,
    DeadlinePassed,
    FrameRejected,
    HaveHeard,
    LinkDown,
    LinkUp,
    PeerReady,
    RepairRefused,
    RepairVerified,
    SendCancel,
    SendFrame,
    SendWant,
    StreamClosed,
    WantHeard,
)
from echo2d.core.repair import QUIET_S, REPAIR_S, WANT_FRAMES_MAX, WANTED_FRAMES_MAX
from echo2d.errors import PeerFault
from tests.unit.relay_peer import (
    FORM,
    FRAMES,
    LEFT,
    RIGHT,
    TABLE,
    UP,
    Peer,
)


@pytest.fixture
def bereft(peer: Peer) -> Peer:
    """It follows UP and RIGHT, one stripe each, holds the table, and has just lost UP; RIGHT is asked on stream 3."""
    peer.plan((UP, ()), (RIGHT, ()))
    peer(LinkUp(UP))
    peer(LinkUp(RIGHT))
    peer.comes(UP, 2, 0, TABLE)
    assert SendWant(RIGHT, 3, FORM, FRAMES) in peer(LinkDown(UP, "reset"))
    return peer


def test_what_a_lost_parent_owed_is_asked_of_another(bereft: Peer) -> None:
    bereft(RepairVerified(RIGHT, FORM, FRAMES[0]))
    transfer = bereft.relay.transfer(FORM)
    assert transfer is not None
    assert transfer.asked_count == len(FRAMES) - 1


def test_a_frame_that_came_by_the_stripe_is_cancelled(bereft: Peer) -> None:
    bereft.comes(RIGHT, 1, 0, TABLE)
    assert SendCancel(RIGHT, FORM, (FRAMES[0],)) in bereft.comes(RIGHT, 1, 1, FRAMES[0])


def test_a_peer_that_does_not_hold_it_is_left_in_peace_for_a_while(bereft: Peer) -> None:
    assert bereft(RepairRefused(RIGHT, FORM, FRAMES[0])) == []
    assert bereft(DeadlinePassed(), after=QUIET_S / 2) == []
    assert bereft(DeadlinePassed(), after=QUIET_S / 2) == [SendWant(RIGHT, 3, FORM, FRAMES[:1])]


def test_what_does_not_come_in_time_is_given_back(bereft: Peer) -> None:
    assert SendCancel(RIGHT, FORM, FRAMES) in bereft(DeadlinePassed(), after=REPAIR_S)


def test_a_bad_repair_is_accused_and_asked_later(bereft: Peer) -> None:
    assert bereft(FrameRejected(RIGHT, 3, FORM, FRAMES[0])) == [Accuse(FORM, FRAMES[0], RIGHT)]


def test_what_is_missing_after_the_last_stripe_is_asked_for(follower: Peer) -> None:
    follower.comes(UP, 2, 0, TABLE)
    assert SendWant(UP, 4, FORM, FRAMES) in follower(StreamClosed(UP, 2, DONE))


def test_wants_are_answered_after_the_stripes(root: Peer) -> None:
    root.asked(LEFT, 2)
    assert root(WantHeard(LEFT, 4, FORM, (FRAMES[5], frame_id(SegmentId(3), 1)))) == []
    root(PeerReady(LEFT))
    answer = root(PeerReady(LEFT))
    assert SendFrame(LEFT, 4, FORM, FRAMES[5], 0, header_only=False) in answer
    assert SendFrame(LEFT, 4, FORM, frame_id(SegmentId(3), 1), 0, header_only=True) in answer


def test_wants_end_when_cancelled_or_with_their_stream(root: Peer) -> None:
    root.asked(LEFT, 2)
    root(WantHeard(LEFT, 4, FORM, FRAMES[:3]))
    root(CancelHeard(LEFT, FORM, FRAMES[:1]))
    root(StreamClosed(LEFT, 4, DONE))
    root(PeerReady(LEFT))
    assert not any(isinstance(action, SendFrame) and action.stream == 4 for action in root(PeerReady(LEFT)))


def test_wants_are_bounded(root: Peer) -> None:
    root.asked(LEFT, 2)
    for _ in range(WANTED_FRAMES_MAX // WANT_FRAMES_MAX):
        root(WantHeard(LEFT, 4, FORM, FRAMES * (WANT_FRAMES_MAX // len(FRAMES))))
    with pytest.raises(PeerFault, match="wants more than"):
        root(WantHeard(LEFT, 4, FORM, FRAMES[:1]))
    root.relay.check()


def test_late_events_of_a_link_that_is_gone_change_nothing(follower: Peer) -> None:
    follower(LinkDown(LEFT, "reset"))
    for event in (PeerReady(LEFT), StreamClosed(LEFT, 2, ""), HaveHeard(LEFT, FORM, FRAMES), LinkDown(LEFT, "reset")):
        assert follower(event) == []
    assert follower.asked(LEFT, 2) == []
