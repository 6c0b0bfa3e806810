"""Frames that a peer held and lost: they are requested again, and no peer is blamed or left waiting for ever."""

from echo2d.core.base.ids import FrameId, PeerId
from echo2d.core.protocol.peer_messages import FramesWanted, StreamEnded
from echo2d.core.relay.disk_frames import CHILD_GONE_S
from echo2d.core.relay.events import (
    DONE,
    FrameGone,
    FramesFound,
    FramesLost,
    FrameVerified,
    Heard,
    LinkUp,
    PeerReady,
    RelayAction,
    RelayDeadlinePassed,
    RepairRefused,
    RepairVerified,
    ReportEdgeBroken,
    SendFrame,
    Tell,
)
from echo2d.core.relay.streams import LINK_S
from tests.support.relay_peer import (
    FORM,
    FRAMES,
    LEFT,
    RIGHT,
    TABLE,
    UP,
    Peer,
    fill,
    frames_to,
    held,
    told,
)


def test_only_the_frame_that_was_lost_in_the_middle_is_requested(follower: Peer) -> None:
    follower.comes(UP, 2, 0, TABLE)
    follower.comes(UP, 2, 1, FRAMES[0])
    assert follower(FramesLost(FORM, FRAMES[:1])) == [Tell(UP, FramesWanted(4, FORM, FRAMES[:1]))]
    assert follower(FramesLost(FORM, FRAMES[:1])) == []


def test_a_frame_lost_after_the_end_is_requested_and_no_parent_is_reported_late(
    follower: Peer,
) -> None:
    for sequence, frame in enumerate((TABLE, *FRAMES)):
        follower.comes(UP, 2, sequence, frame)
    follower(Heard(UP, StreamEnded(2, DONE)))
    follower.now += 10 * LINK_S
    assert follower(FramesLost(FORM, FRAMES[2:4])) == [Tell(UP, FramesWanted(4, FORM, FRAMES[2:4]))]
    late = follower(RelayDeadlinePassed(), after=LINK_S - 1)
    assert not any(isinstance(action, ReportEdgeBroken) for action in late)


def test_children_wait_for_a_lost_frame_and_get_it_when_it_is_held_again(follower: Peer) -> None:
    follower.asked(LEFT, 2)
    follower.comes(UP, 2, 0, TABLE)
    for sequence, frame in enumerate(FRAMES[:5], 1):
        follower.comes(UP, 2, sequence, frame)
    follower(FramesLost(FORM, FRAMES[3:4]))
    assert frames_to(LEFT, follower(PeerReady(LEFT))) == list(FRAMES[1:3])
    assert frames_to(LEFT, follower(PeerReady(LEFT))) == []
    assert frames_to(LEFT, follower(RepairVerified(UP, FORM, FRAMES[3]))) == [FRAMES[3], FRAMES[4]]


def test_the_root_binds_a_lost_frame_when_it_is_held_again(peer: Peer) -> None:
    fill(peer)
    peer.plan((None, (LEFT,)))
    peer(LinkUp(LEFT))
    peer(FramesLost(FORM, FRAMES[1:2]))
    assert frames_to(LEFT, peer.asked(LEFT, 2)) == [TABLE, FRAMES[0]]
    assert frames_to(LEFT, peer(PeerReady(LEFT))) == []
    assert frames_to(LEFT, peer(FramesFound(FORM, FRAMES[1:2]))) == [FRAMES[1], FRAMES[2]]


def test_a_root_that_lost_a_frame_asks_a_child_that_has_it(root: Peer) -> None:
    root(Heard(LEFT, held(FRAMES)))
    assert wanted_of(root(FramesLost(FORM, FRAMES[:1]))) == [(LEFT, FRAMES[:1])]


def test_a_parent_that_sends_only_the_header_of_a_frame_lost_since_is_not_at_fault(
    follower: Peer,
) -> None:
    follower.comes(UP, 2, 0, TABLE)
    follower(FramesFound(FORM, FRAMES[:1]))
    follower(FramesLost(FORM, FRAMES[:1]))
    follower(FrameVerified(UP, 2, FORM, FRAMES[0], 1, header_only=True))
    assert frames_to(UP, follower.comes(UP, 2, 2, FRAMES[1])) == []


def test_a_lost_frame_is_not_reported_as_held(follower: Peer) -> None:
    follower.comes(UP, 2, 0, TABLE)
    follower.comes(UP, 2, 1, FRAMES[0])
    follower.comes(UP, 2, 2, FRAMES[1])
    follower(FramesLost(FORM, FRAMES[:1]))
    follower.plan((RIGHT, (LEFT,)), generation=1)
    assert Tell(RIGHT, held((TABLE, FRAMES[1]))) in follower(LinkUp(RIGHT))


def test_a_child_that_wants_a_lost_frame_learns_that_it_is_not_held(follower: Peer) -> None:
    follower.comes(UP, 2, 0, TABLE)
    follower.comes(UP, 2, 1, FRAMES[0])
    follower(FramesLost(FORM, FRAMES[:1]))
    answer = follower.wanted(LEFT, 4, FRAMES[:1])
    assert answer == [SendFrame(LEFT, 4, FORM, FRAMES[0], 0, header_only=True)]


def wanted_of(actions: list[RelayAction]) -> list[tuple[PeerId, tuple[FrameId, ...]]]:
    return [(peer, wanted.frames) for peer, wanted in told(FramesWanted, actions)]


def test_a_root_asks_the_children_that_got_its_lost_frames_one_by_one(
    root: Peer,
) -> None:
    assert FRAMES[0] in frames_to(LEFT, root.asked(LEFT, 2))
    first = wanted_of(root(FramesLost(FORM, FRAMES[:1])))
    assert first == [(LEFT, FRAMES[:1])]
    assert wanted_of(root(RepairRefused(LEFT, FORM, FRAMES[0]))) == [(RIGHT, FRAMES[:1])]
    root(RepairVerified(RIGHT, FORM, FRAMES[0]))
    assert FrameGone(FORM, FRAMES[0]) not in root(RelayDeadlinePassed(), after=2 * CHILD_GONE_S)


def test_a_root_reports_once_that_a_lost_frame_is_gone(root: Peer) -> None:
    root(FramesLost(FORM, FRAMES[1:3]))
    assert FrameGone(FORM, FRAMES[1]) not in root(RelayDeadlinePassed(), after=CHILD_GONE_S - 0.5)
    assert FrameGone(FORM, FRAMES[1]) in root(RelayDeadlinePassed(), after=0.5)
    assert FrameGone(FORM, FRAMES[1]) not in root(RelayDeadlinePassed(), after=CHILD_GONE_S)


def test_a_peer_other_than_the_root_waits_for_its_lost_frames(follower: Peer) -> None:
    follower.comes(UP, 2, 0, TABLE)
    follower.comes(UP, 2, 1, FRAMES[0])
    follower(FramesLost(FORM, FRAMES[:1]))
    assert FrameGone(FORM, FRAMES[0]) not in follower(RelayDeadlinePassed(), after=2 * CHILD_GONE_S)
