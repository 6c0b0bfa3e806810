"""Frames outside the stripes: which peer is asked, what it answers, which requests are withdrawn."""

import pytest

from echo2d.core.base.ids import SegmentId, frame_id
from echo2d.core.protocol.peer_messages import FramesCancelled, FramesWanted, StreamEnded
from echo2d.core.relay.events import (
    DONE,
    Accuse,
    ExpectPeer,
    ForgetPeer,
    FormArrived,
    FormComplete,
    FrameRejected,
    Heard,
    LinkDown,
    LinkUp,
    PeerReady,
    RelayDeadlinePassed,
    RelayEvent,
    RepairRefused,
    RepairVerified,
    SendFrame,
    TableHeld,
    Tell,
)
from echo2d.core.relay.frame_repair import (
    FRAME_LATE_S,
    REPAIR_S,
    SOURCE_QUIET_S,
    WANT_FRAMES_MAX,
    WANTED_FRAMES_MAX,
)
from echo2d.core.relay.streams import LINK_S
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
    told,
)


@pytest.fixture
def bereft(peer: Peer) -> Peer:
    """It follows UP and RIGHT, one stripe each, holds the table, and has just lost UP; RIGHT is asked on stream 3."""
    peer.plan((UP, ()), (RIGHT, ()))
    peer(LinkUp(UP))
    peer(LinkUp(RIGHT))
    peer.comes(UP, 2, 0, TABLE)
    assert Tell(RIGHT, FramesWanted(3, FORM, FRAMES)) in peer(LinkDown(UP, "reset"))
    return peer


def test_frames_that_a_lost_parent_owed_are_requested_from_another_peer(bereft: Peer) -> None:
    bereft(RepairVerified(RIGHT, FORM, FRAMES[0]))
    transfer = bereft.relay.transfer(FORM)
    assert transfer is not None
    assert transfer.asked_count == len(FRAMES) - 1


def test_a_missing_frame_is_requested_from_a_peer_and_not_from_the_seed(peer: Peer) -> None:
    """The seed, here RIGHT, sends stripes and says nothing of what it has."""
    peer.plan((UP, (LEFT,)), (RIGHT, ()))
    for other in (UP, LEFT, RIGHT):
        peer(LinkUp(other))
    peer.comes(UP, 2, 0, TABLE)
    peer(Heard(LEFT, held(FRAMES[:2])))
    asked = told(FramesWanted, peer(LinkDown(UP, "reset")))
    assert {peer: wanted.frames for peer, wanted in asked} == {
        LEFT: FRAMES[:2],
        RIGHT: FRAMES[2:],
    }


def test_a_request_for_a_frame_that_arrived_by_the_stripe_is_cancelled(bereft: Peer) -> None:
    bereft.comes(RIGHT, 1, 0, TABLE)
    assert Tell(RIGHT, FramesCancelled(FORM, (FRAMES[0],))) in bereft.comes(RIGHT, 1, 1, FRAMES[0])


def test_a_peer_that_does_not_hold_a_frame_is_not_asked_for_a_while(bereft: Peer) -> None:
    assert bereft(RepairRefused(RIGHT, FORM, FRAMES[0])) == []
    assert bereft(RelayDeadlinePassed(), after=SOURCE_QUIET_S / 2) == []
    assert bereft(RelayDeadlinePassed(), after=SOURCE_QUIET_S / 2) == [
        Tell(RIGHT, FramesWanted(3, FORM, FRAMES[:1]))
    ]


def test_a_requested_frame_that_is_late_may_be_requested_elsewhere(bereft: Peer) -> None:
    assert Tell(RIGHT, FramesCancelled(FORM, FRAMES)) in bereft(
        RelayDeadlinePassed(), after=REPAIR_S
    )


def test_a_peer_that_sends_a_bad_frame_is_accused_and_asked_later(bereft: Peer) -> None:
    assert bereft(FrameRejected(RIGHT, 3, FORM, FRAMES[0])) == [Accuse(FORM, FRAMES[0], RIGHT)]


def test_frames_missing_after_the_last_stripe_are_requested(follower: Peer) -> None:
    follower.comes(UP, 2, 0, TABLE)
    assert Tell(UP, FramesWanted(4, FORM, FRAMES)) in follower(Heard(UP, StreamEnded(2, DONE)))


def test_requests_are_answered_after_the_stripes(root: Peer) -> None:
    root.asked(LEFT, 2)
    assert root(Heard(LEFT, FramesWanted(4, FORM, (FRAMES[5], frame_id(SegmentId(3), 1))))) == []
    sent = drain(root, LEFT)
    assert [action.stream for action in sent] == [2] * (len(FRAMES) - 1) + [4, 4]
    assert sent[-2:] == [
        SendFrame(LEFT, 4, FORM, FRAMES[5], 0, header_only=False),
        SendFrame(LEFT, 4, FORM, frame_id(SegmentId(3), 1), 0, header_only=True),
    ]


def test_requests_end_by_a_cancel_or_with_their_stream(root: Peer) -> None:
    root.asked(LEFT, 2)
    root(Heard(LEFT, FramesWanted(4, FORM, FRAMES[:3])))
    root(Heard(LEFT, FramesCancelled(FORM, FRAMES[:1])))
    root(Heard(LEFT, StreamEnded(4, DONE)))
    assert {action.stream for action in drain(root, LEFT)} == {2}


def test_the_number_of_requests_is_limited(root: Peer) -> None:
    root.asked(LEFT, 2)
    for _ in range(WANTED_FRAMES_MAX // WANT_FRAMES_MAX):
        root(Heard(LEFT, FramesWanted(4, FORM, FRAMES * (WANT_FRAMES_MAX // len(FRAMES)))))
    with pytest.raises(PeerFault, match="wants more than"):
        root(Heard(LEFT, FramesWanted(4, FORM, FRAMES[:1])))
    root.relay.check()


def test_late_events_of_a_link_that_is_gone_change_nothing(follower: Peer) -> None:
    follower(LinkDown(LEFT, "reset"))
    for event in (
        PeerReady(LEFT),
        Heard(LEFT, StreamEnded(2, "")),
        Heard(LEFT, held(FRAMES)),
        LinkDown(LEFT, "reset"),
    ):
        assert follower(event) == []
    assert follower.asked(LEFT, 2) == []


@pytest.fixture
def newcomer(peer: Peer) -> Peer:
    """LEFT and RIGHT hold everything; its stripe would come from UP. LEFT and RIGHT are asked on streams 1."""
    peer(FormComplete(FORM, 1))
    peer.plan((UP, ()), sources=(LEFT, RIGHT))
    peer(LinkUp(UP))
    assert peer(LinkUp(LEFT)) == [Tell(LEFT, FramesWanted(1, FORM, (TABLE,)))]
    peer(TableHeld(FORM, SegmentId(0), SIZES))
    peer(RepairVerified(LEFT, FORM, TABLE))
    return peer


def test_a_newcomer_fetches_from_its_sources_and_then_takes_its_stripes(newcomer: Peer) -> None:
    newcomer(LinkUp(RIGHT))
    for frame in FRAMES[:-1]:
        newcomer(RepairVerified(LEFT, FORM, frame))
    last = newcomer(RepairVerified(LEFT, FORM, FRAMES[-1]))
    assert FormArrived(FORM) in last
    assert opened(UP, 2) in last


def test_frames_on_disk_are_not_fetched(peer: Peer) -> None:
    fill(peer, FRAMES[:-2])
    peer.plan((UP, ()), sources=(LEFT,))
    assert peer(LinkUp(LEFT)) == [Tell(LEFT, FramesWanted(1, FORM, FRAMES[-2:]))]


def test_the_end_game_takes_frames_from_the_most_loaded_source(newcomer: Peer) -> None:
    """LEFT was asked for everything and sends nothing: RIGHT takes over what LEFT would send last."""
    assert newcomer(LinkUp(RIGHT)) == []
    later = newcomer(RelayDeadlinePassed(), after=FRAME_LATE_S)
    half = FRAMES[len(FRAMES) // 2 :]
    assert later == [
        Tell(LEFT, FramesCancelled(FORM, half)),
        Tell(RIGHT, FramesWanted(1, FORM, half)),
    ]
    newcomer(RepairVerified(RIGHT, FORM, half[0]))
    newcomer(RepairVerified(LEFT, FORM, half[0]))  # it was on its way
    transfer = newcomer.relay.transfer(FORM)
    assert transfer is not None
    assert transfer.duplicates == 1


def test_a_source_that_is_sending_keeps_its_requests(newcomer: Peer) -> None:
    newcomer(RepairVerified(LEFT, FORM, FRAMES[0]), after=REPAIR_S - 1)
    assert newcomer(RelayDeadlinePassed(), after=2.0) == []


@pytest.mark.parametrize(
    "event", [RepairRefused(LEFT, FORM, FRAMES[0]), FrameRejected(LEFT, 1, FORM, FRAMES[0])]
)
def test_a_peer_that_lacks_a_frame_is_no_source(newcomer: Peer, event: RelayEvent) -> None:
    newcomer(LinkUp(RIGHT))
    assert opened(UP, 2) not in newcomer(event)
    assert opened(UP, 2) in newcomer(RepairRefused(RIGHT, FORM, FRAMES[0]))


def test_frames_that_a_lost_source_owed_are_requested_from_another_source(newcomer: Peer) -> None:
    newcomer(LinkUp(RIGHT))
    assert newcomer(LinkDown(LEFT, "reset")) == [Tell(RIGHT, FramesWanted(1, FORM, FRAMES))]


def test_a_peer_on_stripes_leaves_them_when_it_gets_sources(
    follower: Peer,
) -> None:
    follower(FormComplete(FORM, 1))
    follower(LinkUp(RIGHT))
    again = follower.plan((UP, ()), generation=1, sources=(RIGHT,))
    assert [action for action in again if not isinstance(action, ExpectPeer | ForgetPeer)][-2:] == [
        Tell(UP, StreamEnded(2, "not the parent any more")),
        Tell(RIGHT, FramesWanted(1, FORM, (TABLE,))),
    ]
    assert opened(UP, 4, generation=1) in follower(RepairRefused(RIGHT, FORM, TABLE))
    assert follower.plan((UP, ()), generation=2, sources=(RIGHT,)) == [], (
        "it said that it does not have it"
    )


def test_a_newcomer_takes_its_stripes_if_no_source_answers(peer: Peer) -> None:
    peer(FormComplete(FORM, 1))
    peer.plan((UP, ()), sources=(LEFT,))
    peer(LinkUp(UP))
    assert peer(RelayDeadlinePassed(), after=LINK_S - 0.1) == []
    assert opened(UP, 2) in peer(RelayDeadlinePassed(), after=0.1)
