"""Streams from parents: when they are opened, what may arrive on them, when a parent is at fault."""

import pytest

from echo2d.core.base.ids import FrameId, Generation, PlanId, SegmentId
from echo2d.core.protocol.peer_messages import FramesHeld, StreamEnded
from echo2d.core.relay.events import (
    DONE,
    Accuse,
    ExpectPeer,
    FormComplete,
    FormForgotten,
    FrameRejected,
    FramesFound,
    FrameVerified,
    Heard,
    LinkDown,
    LinkUp,
    RelayDeadlinePassed,
    RepairRefused,
    RepairVerified,
    ReportEdgeBroken,
    TableHeld,
    Tell,
)
from echo2d.core.relay.streams import LINK_S, STALL_GAPS
from echo2d.core.relay.stripes import GAP_DECAY, GAP_START_S
from echo2d.errors import PeerFault
from tests.support.relay_peer import (
    FORM,
    FRAMES,
    LEFT,
    RIGHT,
    SIZES,
    TABLE,
    UP,
    Peer,
    drain,
    fill,
    held,
    opened,
    sends,
    told,
)


def test_a_relay_reports_its_held_frames_and_opens_a_stream_where_it_stopped(peer: Peer) -> None:
    peer(TableHeld(FORM, SegmentId(0), SIZES))
    peer(FramesFound(FORM, FRAMES[:2]))
    assert [type(action) for action in peer.plan((UP, ()))] == [ExpectPeer]
    assert peer(LinkUp(UP)) == [Tell(UP, held((TABLE, *FRAMES[:2]))), opened(UP, 2)]


def test_a_dropped_form_is_reported_as_no_longer_held(peer: Peer) -> None:
    fill(peer)
    peer.plan((UP, ()))
    peer(LinkUp(UP))
    assert Tell(UP, held(())) in peer(FormForgotten(FORM))
    fill(peer, FRAMES[:1])
    assert told(FramesHeld, peer.plan((UP, ()), plan=2)) == [(UP, held((TABLE, FRAMES[0])))]


def test_a_child_that_dropped_the_form_gets_the_whole_form(root: Peer) -> None:
    root(Heard(LEFT, held((TABLE, *FRAMES))))
    root(Heard(LEFT, held(())))
    sent = [*sends(root.asked(LEFT, 2)), *drain(root, LEFT)]
    assert [frame.header_only for frame in sent] == [False] * (1 + len(FRAMES))


@pytest.mark.parametrize(
    ("sequence", "frame", "header_only"),
    [(2, FRAMES[0], False), (1, FRAMES[0], True), (1, TABLE, False)],
    ids=["hole", "header of a frame not held", "twice"],
)
def test_a_message_that_no_honest_parent_sends_is_the_parents_fault(
    follower: Peer, sequence: int, frame: FrameId, header_only: bool
) -> None:
    follower.comes(UP, 2, 0, TABLE)
    with pytest.raises(PeerFault):
        follower(FrameVerified(UP, 2, FORM, frame, sequence, header_only))
    follower.relay.check()


def test_a_stripe_that_begins_without_its_table_is_the_parents_fault(follower: Peer) -> None:
    follower(TableHeld(FORM, SegmentId(0), SIZES))
    with pytest.raises(PeerFault):
        follower(FrameVerified(UP, 2, FORM, FRAMES[0], 0, header_only=False))


def test_a_lost_parent_is_reported_and_asked_again_when_it_returns(follower: Peer) -> None:
    follower.comes(UP, 2, 0, TABLE)
    assert follower(LinkDown(UP, "reset")) == [
        ReportEdgeBroken(PlanId(1), Generation(0), UP, "reset")
    ]
    assert follower(LinkUp(UP)) == [Tell(UP, held((TABLE,))), opened(UP, 2, first=1)]


def test_a_lost_child_is_reported_unless_it_holds_the_whole_form(root: Peer) -> None:
    root.asked(LEFT, 2)
    assert root(LinkDown(LEFT, "reset")) == [
        ReportEdgeBroken(PlanId(1), Generation(0), LEFT, "reset")
    ]
    root.asked(RIGHT, 2)
    drain(root, RIGHT)
    assert root(LinkDown(RIGHT, "reset")) == []


def test_a_stalled_parent_is_reported_once(follower: Peer) -> None:
    follower.comes(UP, 2, 0, TABLE)
    for sequence, frame in enumerate(FRAMES[:7], start=1):
        follower.comes(UP, 2, sequence, frame, after=0.1)
    expected_gap = GAP_START_S * GAP_DECAY**8
    assert follower(RelayDeadlinePassed(), after=STALL_GAPS * expected_gap - 0.01) == []
    assert follower(RelayDeadlinePassed(), after=0.02) == [
        ReportEdgeBroken(PlanId(1), Generation(0), UP, "stalled")
    ]
    assert follower(RelayDeadlinePassed(), after=60.0) == []


def test_a_silent_parent_is_not_stalled_if_every_known_frame_is_held(follower: Peer) -> None:
    for sequence, frame in enumerate((TABLE, *FRAMES)):
        follower.comes(UP, 2, sequence, frame)
    assert follower(RelayDeadlinePassed(), after=600.0) == []


def test_a_parent_that_sends_another_stripe_is_not_accused(peer: Peer) -> None:
    peer.plan((UP, ()), (UP, ()))
    peer(LinkUp(UP))
    peer.comes(UP, 2, 0, TABLE)
    peer.comes(UP, 4, 0, TABLE, after=100.0)
    assert peer(RelayDeadlinePassed(), after=0.9) == []


def test_a_parent_without_a_link_is_reported_in_time(peer: Peer) -> None:
    peer.plan((UP, ()))
    assert peer(RelayDeadlinePassed(), after=LINK_S - 0.1) == []
    assert peer(RelayDeadlinePassed(), after=0.2) == [
        ReportEdgeBroken(PlanId(1), Generation(0), UP, "no link")
    ]


def test_a_parent_that_refuses_is_reported_and_asked_again_later(follower: Peer) -> None:
    refused = follower(Heard(UP, StreamEnded(2, "not a child in this plan")))
    assert refused == [ReportEdgeBroken(PlanId(1), Generation(0), UP, "not a child in this plan")]
    assert opened(UP, 4) in follower(RelayDeadlinePassed(), after=LINK_S)


def test_alarms_stop_when_no_frame_is_expected(follower: Peer) -> None:
    assert follower.relay.wake_at() is not None
    for sequence, frame in enumerate((TABLE, *FRAMES)):
        follower.comes(UP, 2, sequence, frame)
    follower(FormComplete(FORM, 1))
    follower(Heard(UP, StreamEnded(2, DONE)))
    follower(RelayDeadlinePassed(), after=1.0)
    assert follower.relay.wake_at() is None


def test_a_parent_that_ends_a_stripe_without_its_frames_is_reported(follower: Peer) -> None:
    follower.comes(UP, 2, 0, TABLE)
    follower(Heard(UP, StreamEnded(2, DONE)), after=60.0)
    refused = [RepairRefused(UP, FORM, frame) for frame in FRAMES]
    assert not [
        action
        for event in refused
        for action in follower(event)
        if isinstance(action, ReportEdgeBroken)
    ]
    too_early = ReportEdgeBroken(PlanId(1), Generation(0), UP, "ended too early")
    assert too_early not in follower(RelayDeadlinePassed(), after=LINK_S - 0.1)
    assert too_early in follower(RelayDeadlinePassed(), after=0.2)
    assert too_early not in follower(RelayDeadlinePassed(), after=LINK_S - 0.1)
    follower(RepairVerified(UP, FORM, FRAMES[0]))
    assert too_early not in follower(RelayDeadlinePassed(), after=LINK_S - 0.1)
    assert too_early in follower(RelayDeadlinePassed(), after=0.2)


def test_a_parent_whose_stripe_ended_is_not_blamed_while_another_sends_frames(
    peer: Peer,
) -> None:
    peer.plan((UP, ()), (LEFT, ()))
    peer(LinkUp(UP))
    peer(LinkUp(LEFT))
    peer.comes(UP, 2, 0, TABLE)
    peer(Heard(UP, StreamEnded(2, DONE)))
    for sequence, frame in enumerate((TABLE, *FRAMES[:4])):
        peer.comes(LEFT, 1, sequence, frame, after=LINK_S / 2)
        later = peer(RelayDeadlinePassed())
        assert not any(isinstance(action, ReportEdgeBroken) for action in later)


def test_a_bad_frame_accuses_its_parent_and_ends_the_stream(follower: Peer) -> None:
    follower.comes(UP, 2, 0, TABLE)
    assert follower(FrameRejected(UP, 2, FORM, FRAMES[0])) == [
        Accuse(FORM, FRAMES[0], UP),
        Tell(UP, StreamEnded(2, "bad frame")),
        ReportEdgeBroken(PlanId(1), Generation(0), UP, "bad frame"),
    ]
    assert opened(UP, 4, first=1, generation=1) in follower.plan((UP, (LEFT,)), generation=1)
