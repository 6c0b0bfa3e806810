"""Sequences: how the root binds frames, and how a relay passes them on."""

from collections import Counter

import pytest

from echo2d.core.base.ids import FrameId, PeerId, SegmentId
from echo2d.core.protocol.peer_messages import FramesPassed, FramesWanted, StreamEnded
from echo2d.core.relay.credit import CREDIT_FRAMES
from echo2d.core.relay.events import (
    DONE,
    FormArrived,
    FormComplete,
    FramesFound,
    Heard,
    LinkUp,
    PeerReady,
    RelayDeadlinePassed,
    RepairVerified,
    SendFrame,
    TableHeld,
    Tell,
)
from echo2d.core.relay.outlet import SLOW_S
from echo2d.errors import PeerFault
from tests.support.relay_peer import (
    FORM,
    FRAMES,
    LEFT,
    MANY,
    MANY_SIZES,
    RIGHT,
    SIZES,
    TABLE,
    UP,
    Peer,
    drain,
    fill,
    frames_to,
    held,
    sends,
)


def test_the_root_binds_as_many_frames_as_the_link_takes(root: Peer) -> None:
    sent = sends(root.asked(LEFT, 2))
    assert [(action.sequence, action.frame) for action in sent] == [(0, TABLE), (1, FRAMES[0])]
    assert frames_to(LEFT, root(PeerReady(LEFT))) == list(FRAMES[1:3])


def test_a_slow_child_delays_no_other_peer(root: Peer) -> None:
    """I6: LEFT never gets ready again, RIGHT gets everything."""
    root.asked(LEFT, 2)
    root.asked(RIGHT, 2)
    sent = [*sends(root(RelayDeadlinePassed(), after=SLOW_S)), *drain(root, RIGHT)]
    assert [(action.peer, action.frame) for action in sent] == [
        (RIGHT, frame) for frame in (TABLE, *FRAMES)
    ]


def test_the_stream_ends_after_the_last_frame(root: Peer) -> None:
    root.asked(LEFT, 2)
    for frame in (1, 3, 5):
        assert frames_to(LEFT, root(PeerReady(LEFT))) == list(FRAMES[frame : frame + 2])
    last = root(PeerReady(LEFT))
    assert frames_to(LEFT, last) == [FRAMES[-1]]
    assert last[-1] == Tell(LEFT, StreamEnded(2, DONE))


def test_a_complete_child_that_joins_after_the_end_is_told_the_end(root: Peer) -> None:
    root.asked(LEFT, 2)
    drain(root, LEFT)
    assert root.asked(RIGHT, 4, first=len(FRAMES))[-1] == Tell(RIGHT, StreamEnded(4, DONE))


def test_frames_spread_while_the_form_is_being_encoded(peer: Peer) -> None:
    peer.plan((None, (LEFT,)))
    peer(LinkUp(LEFT))
    assert peer.asked(LEFT, 2) == []
    assert peer(TableHeld(FORM, SegmentId(0), SIZES)) == []
    assert frames_to(LEFT, peer(FramesFound(FORM, FRAMES[:1]))) == [TABLE, FRAMES[0]]
    assert peer(PeerReady(LEFT)) == []
    assert frames_to(LEFT, peer(FramesFound(FORM, FRAMES[1:2]))) == [FRAMES[1]]


def test_every_stripe_gets_the_table_and_one_stripe_gets_each_frame(peer: Peer) -> None:
    peer.plan((None, (LEFT,)), (None, (RIGHT,)))
    fill(peer)
    peer(LinkUp(LEFT))
    peer(LinkUp(RIGHT))
    sent = sends(peer.asked(LEFT, 2, 0)) + sends(peer.asked(RIGHT, 2, 1))
    sent += drain(peer, LEFT, RIGHT)
    left, right = ([one.frame for one in sent if one.peer == to] for to in (LEFT, RIGHT))
    assert left[0] == right[0] == TABLE
    assert sorted(left[1:] + right[1:]) == list(FRAMES)


@pytest.fixture
def relays(peer: Peer) -> Peer:
    """The root of two stripes, to LEFT and to RIGHT, who both have children. Nothing is to be sent yet."""
    peer.plan((None, (LEFT,)), (None, (RIGHT,)))
    for stripe, relay in enumerate((LEFT, RIGHT)):
        peer(LinkUp(relay))
        peer.asked(relay, 2, stripe)
        peer(passed(relay, 0))
    peer(TableHeld(FORM, SegmentId(0), MANY_SIZES))
    return peer


def passed(relay: PeerId, sequence: int, waiting: int = 0) -> Heard:
    """What a relay says that follows on stream 2."""
    return Heard(relay, FramesPassed(2, sequence, waiting))


def counts(sent: list[SendFrame]) -> dict[PeerId, int]:
    """How many go to each, tables included."""
    return dict(Counter(action.peer for action in sent))


def test_a_relay_gets_no_more_than_its_credit(relays: Peer) -> None:
    sent = [*sends(relays(FramesFound(FORM, MANY))), *drain(relays, LEFT, RIGHT)]
    assert counts(sent) == {LEFT: CREDIT_FRAMES, RIGHT: CREDIT_FRAMES}


def test_the_next_frame_goes_to_the_relay_that_has_passed_one_on(relays: Peer) -> None:
    relays(FramesFound(FORM, MANY))
    drain(relays, LEFT, RIGHT)
    assert counts(sends(relays(passed(RIGHT, 1, waiting=2)))) == {RIGHT: 1}
    assert counts(sends(relays(passed(LEFT, 1, waiting=2)))) == {LEFT: 1}


def test_the_relay_that_passes_a_frame_on_first_gets_the_next_frame(relays: Peer) -> None:
    """LEFT passes on 30 frames a second, RIGHT 10: two frames take LEFT less time than one takes RIGHT."""
    relays(FramesFound(FORM, MANY[:44]))
    drain(relays, LEFT, RIGHT)
    for tick in range(1, 31):
        relays(passed(LEFT, tick, waiting=2), after=1 / 30)
        if tick % 3 == 0:
            relays(passed(RIGHT, tick // 3, waiting=2))
        drain(relays, LEFT, RIGHT)
    relays(passed(LEFT, 31, waiting=2), after=1 / 30)
    relays(passed(RIGHT, 12, waiting=1))
    assert counts(sends(relays(FramesFound(FORM, MANY[44:45])))) == {LEFT: 1}


def test_a_stalled_relay_delays_no_peer(relays: Peer) -> None:
    """I6: RIGHT passes on nothing, and gets no more than its credit."""
    sent = [*sends(relays(FramesFound(FORM, MANY))), *drain(relays, LEFT, RIGHT)]
    for sequence in range(1, len(MANY)):
        sent += sends(relays(passed(LEFT, min(sequence, counts(sent)[LEFT]))))
        sent += drain(relays, LEFT)
    assert counts(sent) == {LEFT: 2 + len(MANY) - CREDIT_FRAMES, RIGHT: CREDIT_FRAMES}


def test_a_relay_without_children_gets_all_that_its_link_takes(peer: Peer) -> None:
    """It reports nothing, and counts as one that has passed on what it was given."""
    peer.plan((None, (LEFT,)), (None, (RIGHT,)))
    peer(LinkUp(LEFT))
    peer.asked(LEFT, 2, 0)
    peer(TableHeld(FORM, SegmentId(0), MANY_SIZES))
    sent = [*sends(peer(FramesFound(FORM, MANY))), *drain(peer, LEFT)]
    assert counts(sent) == {LEFT: 1 + len(MANY)}


def test_a_single_stripe_needs_no_credit(peer: Peer) -> None:
    peer.plan((None, (RIGHT,)))
    peer(LinkUp(RIGHT))
    peer.asked(RIGHT, 2)
    peer(passed(RIGHT, 0))
    peer(TableHeld(FORM, SegmentId(0), MANY_SIZES))
    sent = [*sends(peer(FramesFound(FORM, MANY))), *drain(peer, RIGHT)]
    assert [action.frame for action in sent] == [TABLE, *MANY]


# the spare stripe


def with_spare(peer: Peer, share: float) -> Peer:
    """The root of LEFT's stripe, which LEFT passes on, and of a spare one to both."""
    peer.plan((None, (LEFT,)), (None, (LEFT, RIGHT)), spares=(0.0, share))
    peer(LinkUp(LEFT))
    peer(LinkUp(RIGHT))
    peer.asked(LEFT, 2, 0)
    peer(passed(LEFT, 0))
    peer.asked(LEFT, 4, 1)
    peer.asked(RIGHT, 2, 1)
    peer(TableHeld(FORM, SegmentId(0), MANY_SIZES))
    return peer


def streams_of(sent: list[SendFrame], to: PeerId) -> dict[int, list[FrameId]]:
    """The payload frames on each stream to this peer."""
    streams: dict[int, list[FrameId]] = {}
    for action in sent:
        if action.peer == to and action.frame != TABLE:
            streams.setdefault(action.stream, []).append(action.frame)
    return streams


def test_the_spare_stripe_takes_what_no_relay_takes(peer: Peer) -> None:
    root = with_spare(peer, 1.0)
    sent = [*sends(root(FramesFound(FORM, MANY))), *drain(root, LEFT, RIGHT)]
    ordinary, spare = streams_of(sent, LEFT)[2], streams_of(sent, LEFT)[4]
    assert len(ordinary) == CREDIT_FRAMES - 1, "the table is one of the three"
    assert sorted((*ordinary, *spare)) == list(MANY)
    assert streams_of(sent, RIGHT) == {2: spare}


def test_the_spare_stripe_takes_nothing_while_a_relay_does(peer: Peer) -> None:
    root = with_spare(peer, 1.0)
    sent = [*sends(root(FramesFound(FORM, MANY[:2]))), *drain(root, LEFT, RIGHT)]
    root(passed(LEFT, 3))
    sent += [*sends(root(FramesFound(FORM, MANY[2:5]))), *drain(root, LEFT, RIGHT)]
    assert streams_of(sent, LEFT) == {2: list(MANY[:5])}


@pytest.mark.parametrize("share", [0.1, 0.25])
def test_the_spare_stripe_takes_no_more_than_its_share(peer: Peer, share: float) -> None:
    """And the frame that fills it. The rest waits for the relay."""
    root = with_spare(peer, share)
    sent = [*sends(root(FramesFound(FORM, MANY))), *drain(root, LEFT, RIGHT)]
    assert len(streams_of(sent, RIGHT)[2]) == share * len(MANY) + 1
    assert len(streams_of(sent, LEFT)[2]) == CREDIT_FRAMES - 1


# at every peer


def test_a_child_that_holds_a_frame_gets_its_header(root: Peer) -> None:
    root(Heard(LEFT, held((TABLE, FRAMES[1]))))
    sent = [*sends(root.asked(LEFT, 2)), *drain(root, LEFT)]
    assert [action.frame for action in sent if action.header_only] == [TABLE, FRAMES[1]]
    assert [action.frame for action in sent] == [TABLE, *FRAMES]


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


def test_frames_are_passed_on_in_sequence_as_they_arrive(follower: Peer) -> None:
    assert frames_to(LEFT, follower.comes(UP, 2, 0, TABLE)) == [TABLE]
    assert frames_to(LEFT, follower.comes(UP, 2, 1, FRAMES[4])) == [FRAMES[4]]
    assert follower.comes(UP, 2, 1, FRAMES[4]) == []  # once more: a late duplicate


def test_a_child_may_begin_at_any_frame(follower: Peer) -> None:
    follower.comes(UP, 2, 0, TABLE)
    follower.comes(UP, 2, 1, FRAMES[0])
    follower(PeerReady(LEFT))
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
    for _ in range(3):
        assert Tell(LEFT, StreamEnded(2, DONE)) not in follower(PeerReady(LEFT))
    assert follower(PeerReady(LEFT))[-1] == Tell(LEFT, StreamEnded(2, DONE))


def test_the_form_is_complete_once_every_frame_is_held_and_the_end_is_known(follower: Peer) -> None:
    for sequence, frame in enumerate((TABLE, *FRAMES)):
        assert FormArrived(FORM) not in follower.comes(UP, 2, sequence, frame)
    assert follower(FormComplete(FORM, 1)) == [FormArrived(FORM)]
    assert follower(FormComplete(FORM, 1)) == []


def test_a_request_before_the_beginning_of_a_stripe_is_the_childs_fault(follower: Peer) -> None:
    with pytest.raises(PeerFault):
        follower.asked(LEFT, 4, first=-1)
