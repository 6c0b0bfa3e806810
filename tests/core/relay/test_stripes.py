"""Sequences: how the root binds frames, and how a relay passes them on."""

import pytest

from echo2d.core.base.ids import FrameId, PeerId, SegmentId, frame_id
from echo2d.core.protocol.peer_messages import FramesWanted, StreamEnded
from echo2d.core.relay.events import (
    DONE,
    FormArrived,
    FormComplete,
    FramesFound,
    Heard,
    LinkUp,
    PeerReady,
    RelayAction,
    RelayDeadlinePassed,
    RepairVerified,
    SendFrame,
    TableHeld,
    Tell,
)
from echo2d.core.relay.stripes import LEAD_BYTES, STILL_S, STREAM_FRAMES_MAX
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
    fill,
    frames_to,
    held,
)


def test_the_root_binds_as_much_as_the_lane_takes(root: Peer) -> None:
    sent = root.asked(LEFT, 2)
    assert frames_to(LEFT, sent) == [TABLE, *FRAMES[: STREAM_FRAMES_MAX - 1]]
    assert [action.sequence for action in sent if isinstance(action, SendFrame)] == list(
        range(STREAM_FRAMES_MAX)
    )
    assert frames_to(LEFT, root(PeerReady(LEFT))) == list(
        FRAMES[STREAM_FRAMES_MAX - 1 : 2 * STREAM_FRAMES_MAX - 1]
    )


def test_a_slow_child_holds_up_nobody(root: Peer) -> None:
    """I6: LEFT never gets ready again, RIGHT gets everything."""
    root.asked(LEFT, 2)
    got = frames_to(RIGHT, root.asked(RIGHT, 2))
    while more := frames_to(RIGHT, actions := root(PeerReady(RIGHT))):
        got += more
        assert frames_to(LEFT, actions) == []
    assert got == [TABLE, *FRAMES]
    assert frames_to(LEFT, root(PeerReady(LEFT))) == list(FRAMES[3:7])


def test_the_stream_ends_after_the_last_frame(root: Peer) -> None:
    root.asked(LEFT, 2)
    root(PeerReady(LEFT))
    last = root(PeerReady(LEFT))
    assert frames_to(LEFT, last) == [FRAMES[-1]]
    assert last[-1] == Tell(LEFT, StreamEnded(2, DONE))


def test_frames_spread_while_the_form_is_being_encoded(peer: Peer) -> None:
    peer.plan((None, (LEFT,)))
    peer(LinkUp(LEFT))
    assert peer.asked(LEFT, 2) == []
    assert peer(TableHeld(FORM, SegmentId(0), SIZES)) == []
    assert frames_to(LEFT, peer(FramesFound(FORM, FRAMES[:2]))) == [TABLE, *FRAMES[:2]]
    assert frames_to(LEFT, peer(FramesFound(FORM, FRAMES[2:]))) == [FRAMES[2]]


def test_every_stripe_gets_the_table_and_each_frame_goes_to_one(peer: Peer) -> None:
    peer.plan((None, (LEFT,)), (None, (RIGHT,)))
    fill(peer)
    peer(LinkUp(LEFT))
    peer(LinkUp(RIGHT))
    left, right = frames_to(LEFT, peer.asked(LEFT, 2, 0)), frames_to(RIGHT, peer.asked(RIGHT, 2, 1))
    for _ in range(3):
        left += frames_to(LEFT, peer(PeerReady(LEFT)))
        right += frames_to(RIGHT, peer(PeerReady(RIGHT)))
    assert left[0] == right[0] == TABLE
    assert sorted(left[1:] + right[1:]) == list(FRAMES)


MANY = tuple(frame_id(SegmentId(0), index) for index in range(1, 61))


@pytest.fixture
def weighted(peer: Peer) -> Peer:
    """The root of two stripes, of three quarters to LEFT and a quarter to RIGHT; a frame is as much as the lead."""
    peer.plan((None, (LEFT,)), (None, (RIGHT,)), weights=(0.75, 0.25))
    peer(LinkUp(LEFT))
    peer(LinkUp(RIGHT))
    peer.asked(LEFT, 2, 0)
    peer.asked(RIGHT, 2, 1)
    peer(TableHeld(FORM, SegmentId(0), (LEAD_BYTES,) * len(MANY)))
    return peer


def while_ready(peer: Peer, to: PeerId, actions: list[RelayAction]) -> list[FrameId]:
    """What goes there, and goes on going while that link alone has room."""
    frames = frames_to(to, actions)
    while more := frames_to(to, peer(PeerReady(to))):
        frames += more
    return [frame for frame in frames if frame != TABLE]


def test_stripes_get_their_share(weighted: Peer) -> None:
    """Both links always have room."""
    counts = dict.fromkeys((LEFT, RIGHT), 0)
    for frame in MANY[:40]:
        for to in counts:
            weighted(PeerReady(to))
        sent = weighted(FramesFound(FORM, (frame,)))
        for to in counts:
            counts[to] += frame in frames_to(to, sent)
    assert counts == {LEFT: 30, RIGHT: 10}


def test_no_stripe_gets_far_ahead(weighted: Peer) -> None:
    """RIGHT's link takes its first few and no more: LEFT stops one lead beyond three times as much."""
    sent = weighted(FramesFound(FORM, MANY))
    right = [frame for frame in frames_to(RIGHT, sent) if frame != TABLE]
    left = while_ready(weighted, LEFT, sent)
    assert len(left) <= 3 * (len(right) + 1) + 1
    assert while_ready(weighted, LEFT, weighted(RelayDeadlinePassed(), after=STILL_S / 2)) == []


def test_a_stripe_that_stands_still_holds_up_nobody(weighted: Peer) -> None:
    """I6: the other takes over, and what was missed is not made up for."""
    while_ready(weighted, LEFT, weighted(FramesFound(FORM, MANY[:-4])))
    assert (
        while_ready(weighted, LEFT, weighted(RelayDeadlinePassed(), after=2 * STILL_S))[-1]
        == MANY[-5]
    )
    weighted(PeerReady(RIGHT))
    sent = weighted(FramesFound(FORM, MANY[-4:]))
    assert len(frames_to(LEFT, sent)) == 3


def test_a_stripe_that_another_lane_of_the_link_is_behind_in_starves_nobody(peer: Peer) -> None:
    """Both children get stripe 0, LEFT alone stripe 1; RIGHT is fast, so that there is always more of 0 for LEFT."""
    peer.plan((None, (LEFT, RIGHT)), (None, (LEFT,)), weights=(0.5, 0.5))
    peer(LinkUp(LEFT))
    peer(LinkUp(RIGHT))
    peer.asked(LEFT, 2, 0)
    peer.asked(RIGHT, 2, 0)
    peer(TableHeld(FORM, SegmentId(0), (LEAD_BYTES,) * len(MANY)))
    while_ready(peer, RIGHT, peer(FramesFound(FORM, MANY[:30])))
    peer.asked(LEFT, 4, 1)
    peer(FramesFound(FORM, MANY[30:]))
    sent = peer(PeerReady(LEFT))
    assert [
        action.sequence for action in sent if isinstance(action, SendFrame) and action.stream == 4
    ]


def test_a_stripe_whose_link_is_still_being_opened_is_waited_for(peer: Peer) -> None:
    """Else whoever comes first would carry the whole beginning."""
    peer.plan((None, (LEFT,)), (None, (RIGHT,)))
    peer(LinkUp(LEFT))
    peer.asked(LEFT, 2, 0)
    peer(TableHeld(FORM, SegmentId(0), (LEAD_BYTES,) * len(MANY)))
    assert len(while_ready(peer, LEFT, peer(FramesFound(FORM, MANY)))) <= 2
    assert while_ready(peer, LEFT, peer(RelayDeadlinePassed(), after=2 * STILL_S))[-1] == MANY[-1]


def test_a_child_of_two_stripes_gets_as_much_of_each_as_others_do(peer: Peer) -> None:
    peer.plan((None, (LEFT, RIGHT)), (None, (LEFT,)))
    peer(LinkUp(LEFT))
    peer(LinkUp(RIGHT))
    for to, stream, stripe in ((LEFT, 2, 0), (LEFT, 4, 1), (RIGHT, 2, 0)):
        peer.asked(to, stream, stripe)
    peer(TableHeld(FORM, SegmentId(0), (100,) * len(MANY)))
    peer(FramesFound(FORM, MANY))
    assert len(frames_to(LEFT, peer(PeerReady(LEFT)))) == 2 * STREAM_FRAMES_MAX
    assert len(frames_to(RIGHT, peer(PeerReady(RIGHT)))) == STREAM_FRAMES_MAX


def test_a_child_that_holds_a_frame_gets_its_header(root: Peer) -> None:
    root(Heard(LEFT, held((TABLE, FRAMES[1]))))
    sent = root.asked(LEFT, 2)
    assert [action.header_only for action in sent if isinstance(action, SendFrame)] == [
        True,
        False,
        True,
        False,
    ]


def test_a_root_that_lacks_frames_fetches_them_from_a_child(peer: Peer) -> None:
    peer.plan((None, (LEFT,)))
    fill(peer, FRAMES[:-1])
    peer(LinkUp(LEFT))
    peer(Heard(LEFT, held((FRAMES[-1],))))
    assert peer(RelayDeadlinePassed(), after=1.0) == [
        Tell(LEFT, FramesWanted(1, FORM, (FRAMES[-1],)))
    ]
    assert peer(RepairVerified(LEFT, FORM, FRAMES[-1])) == [
        Tell(LEFT, StreamEnded(1, DONE)),
        FormArrived(FORM),
    ]


def test_frames_are_passed_on_in_sequence_as_they_come(follower: Peer) -> None:
    assert frames_to(LEFT, follower.comes(UP, 2, 0, TABLE)) == [TABLE]
    assert frames_to(LEFT, follower.comes(UP, 2, 1, FRAMES[4])) == [FRAMES[4]]
    assert follower.comes(UP, 2, 1, FRAMES[4]) == []  # once more: a late duplicate


def test_a_child_may_begin_anywhere(follower: Peer) -> None:
    follower.comes(UP, 2, 0, TABLE)
    follower.comes(UP, 2, 1, FRAMES[0])
    again = follower.asked(LEFT, 4, first=1)
    assert again[0] == Tell(LEFT, StreamEnded(2, "asked for again"))
    assert frames_to(LEFT, again) == [FRAMES[0]]
    follower(PeerReady(LEFT))
    follower.asked(LEFT, 6, first=3)  # it knows more of the stripe than we do
    assert frames_to(LEFT, follower.comes(UP, 2, 2, FRAMES[1])) == []
    assert frames_to(LEFT, follower.comes(UP, 2, 3, FRAMES[2])) == [FRAMES[2]]


def test_the_end_of_a_stripe_is_passed_on_after_its_last_frame(follower: Peer) -> None:
    for sequence, frame in enumerate((TABLE, *FRAMES)):
        follower.comes(UP, 2, sequence, frame)
    assert follower(Heard(UP, StreamEnded(2, DONE))) == []
    assert Tell(LEFT, StreamEnded(2, DONE)) not in follower(PeerReady(LEFT))
    assert follower(PeerReady(LEFT))[-1] == Tell(LEFT, StreamEnded(2, DONE))


def test_the_form_arrives_once_everything_is_held_and_the_end_is_known(follower: Peer) -> None:
    for sequence, frame in enumerate((TABLE, *FRAMES)):
        assert FormArrived(FORM) not in follower.comes(UP, 2, sequence, frame)
    assert follower(FormComplete(FORM, 1)) == [FormArrived(FORM)]
    assert follower(FormComplete(FORM, 1)) == []


def test_a_stripe_from_before_its_beginning_is_the_childs_fault(follower: Peer) -> None:
    with pytest.raises(PeerFault):
        follower.asked(LEFT, 4, first=-1)
