"""The end game: the root has bound everything, and the last frames wait at relays."""

import pytest

from echo2d.core.base.ids import SegmentId
from echo2d.core.protocol.peer_messages import FramesCancelled, FramesWanted, StreamEnded
from echo2d.core.relay.events import (
    DONE,
    FrameVerified,
    Heard,
    LinkUp,
    RelayAction,
    RepairVerified,
    TableHeld,
    Tell,
)
from echo2d.core.relay.frame_repair import END_FRAMES_MAX, WANT_FRAMES_MAX
from tests.support.relay_peer import FORM, MANY, MANY_SIZES, RIGHT, TABLE, UP, Peer, held, told

NEWEST = MANY[::-1]


@pytest.fixture
def late(peer: Peer) -> Peer:
    """It takes the spare stripe from UP, the root, on stream 2, and a stripe from RIGHT, which has much left."""
    peer.plan((UP, ()), (RIGHT, ()), spares=(1.0, 0.0))
    peer(LinkUp(UP))
    peer(LinkUp(RIGHT))
    peer(TableHeld(FORM, SegmentId(0), MANY_SIZES))
    peer(FrameVerified(UP, 2, FORM, TABLE, 0, header_only=False))
    peer(FrameVerified(RIGHT, 1, FORM, TABLE, 0, header_only=True))
    peer(Heard(RIGHT, held(MANY)))
    return peer


def asked(actions: list[RelayAction]) -> list[object]:
    return [(peer, wanted.frames) for peer, wanted in told(FramesWanted, actions)]


def test_the_newest_frames_are_requested_first_and_a_few_at_a_time(late: Peer) -> None:
    """RIGHT, which has them as well, sends the oldest first."""
    ended = late(Heard(UP, StreamEnded(2, DONE)))
    assert asked(ended) == [(UP, NEWEST[:END_FRAMES_MAX])]
    assert END_FRAMES_MAX == 8


def test_no_frame_is_requested_before_a_stripe_has_ended(late: Peer) -> None:
    assert asked(late(FrameVerified(RIGHT, 1, FORM, MANY[0], 1, header_only=False))) == []


def test_one_more_frame_is_requested_for_each_that_arrived(late: Peer) -> None:
    late(Heard(UP, StreamEnded(2, DONE)))
    assert asked(late(RepairVerified(UP, FORM, NEWEST[0]))) == [(UP, NEWEST[8:9])]


def test_a_frame_that_arrives_by_its_stripe_is_cancelled_at_the_root(late: Peer) -> None:
    late(Heard(UP, StreamEnded(2, DONE)))
    came = late(FrameVerified(RIGHT, 1, FORM, NEWEST[0], 1, header_only=False))
    assert Tell(UP, FramesCancelled(FORM, NEWEST[:1])) in came
    assert asked(came) == [(UP, NEWEST[8:9])]


def test_other_peers_are_asked_for_the_oldest_frames_once_all_stripes_have_ended(
    late: Peer,
) -> None:
    late(Heard(UP, StreamEnded(2, DONE)))
    assert asked(late(Heard(RIGHT, StreamEnded(1, DONE)))) == [
        (RIGHT, MANY[:WANT_FRAMES_MAX]),
        (UP, MANY[WANT_FRAMES_MAX : 2 * WANT_FRAMES_MAX - END_FRAMES_MAX]),
    ]
