"""Windows: the root binds no more to a stripe than a while's worth of what its relay passes on."""

import pytest

from echo2d.core.base.ids import FrameId, SegmentId, frame_id
from echo2d.core.protocol.peer_messages import FramesPassed
from echo2d.core.relay.events import (
    FramesFound,
    FrameVerified,
    Heard,
    LinkDown,
    LinkUp,
    PeerReady,
    RelayAction,
    RelayDeadlinePassed,
    TableHeld,
)
from echo2d.core.relay.relay import WATCH_S
from echo2d.core.relay.send_window import (
    PASS_EVERY,
    PASS_FRAMES_MIN,
    PASS_RATE_S,
    PASS_S,
    PASS_START_S,
    PASS_TRICKLE_S,
)
from echo2d.core.relay.streams import STALL_S_MIN
from echo2d.core.relay.stripes import LEAD_BYTES, STREAM_FRAMES_MAX
from echo2d.errors import PeerFault
from tests.support.relay_peer import FORM, LEFT, RIGHT, TABLE, UP, Peer, frames_to, told

MANY = tuple(frame_id(SegmentId(0), index) for index in range(1, 401))
SMALL = LEAD_BYTES // len(MANY) // 4  # bytes of a frame: the lead is no limit here


@pytest.fixture
def two(peer: Peer) -> Peer:
    """The root of two equal stripes, to LEFT and to RIGHT, who has said a while ago that it has children."""
    peer.plan((None, (LEFT,)), (None, (RIGHT,)))
    peer(LinkUp(LEFT))
    peer(LinkUp(RIGHT))
    peer.asked(LEFT, 2, 0)
    peer.asked(RIGHT, 2, 1)
    peer(Heard(RIGHT, FramesPassed(2, 0)))
    peer(Heard(RIGHT, FramesPassed(2, 0)), after=PASS_START_S)
    peer(TableHeld(FORM, SegmentId(0), (SMALL,) * len(MANY)))
    return peer


@pytest.fixture
def relay(peer: Peer) -> Peer:
    """Passes the first of two stripes from UP on to LEFT and RIGHT."""
    peer(LinkUp(UP))
    peer.plan((UP, (LEFT, RIGHT)), (UP, ()))
    for child in (LEFT, RIGHT):
        peer(LinkUp(child))
        peer.asked(child, 2)
    peer(TableHeld(FORM, SegmentId(0), (SMALL,) * len(MANY)))
    peer(FrameVerified(UP, 2, FORM, TABLE, 0, header_only=False))
    return peer


def come(relay: Peer, numbers: range, *, after: float = 0.0) -> list[int]:
    """These frames of the stripe come from UP: what UP is told meanwhile."""
    actions: list[RelayAction] = []
    for number in numbers:
        actions += relay.comes(UP, 2, number, MANY[number - 1], after=after)
    return passed(actions)


def bound(peer: Peer, actions: list[RelayAction]) -> list[FrameId]:
    """To RIGHT, whose link always has room."""
    frames = frames_to(RIGHT, actions)
    while more := frames_to(RIGHT, peer(PeerReady(RIGHT))):
        frames += more
    return frames


def passed(actions: list[RelayAction]) -> list[int]:
    return [message.sequence for _, message in told(FramesPassed, actions)]


def test_a_window_and_no_more_is_bound_ahead(two: Peer) -> None:
    assert len(bound(two, two(FramesFound(FORM, MANY)))) == PASS_FRAMES_MIN
    assert len(bound(two, two(Heard(RIGHT, FramesPassed(2, 5))))) == 5
    assert bound(two, two(Heard(RIGHT, FramesPassed(2, 3)))) == [], "older than what is known"


def test_the_window_is_as_long_as_the_way_there_and_a_while(two: Peer) -> None:
    """It passes on 100 frames/s, and says so 0.1 s later."""
    bound(two, two(FramesFound(FORM, MANY)))
    for number in range(1, 6):
        two(Heard(RIGHT, FramesPassed(2, 10 * number)), after=PASS_RATE_S)
        ahead = bound(two, two(RelayDeadlinePassed()))
    stripe = two.relay._forms[FORM].stripes[two.relay._links[RIGHT].child_streams[0].stripe.number]
    assert ahead
    assert len(stripe.log) - 50 == pytest.approx(100 * (PASS_S + PASS_RATE_S), abs=2)


def test_below_a_closed_window_a_frame_comes_now_and_then(two: Peer) -> None:
    """Else somebody who waits there for the next one would take its parent for stalled."""
    bound(two, two(FramesFound(FORM, MANY[:-9])))
    for _ in range(3):
        assert bound(two, two(RelayDeadlinePassed(), after=PASS_TRICKLE_S / 2)) == []
        assert len(bound(two, two(RelayDeadlinePassed(), after=PASS_TRICKLE_S))) == 1
    assert PASS_TRICKLE_S + WATCH_S < STALL_S_MIN


def test_what_was_not_sent_cannot_be_passed_on(two: Peer) -> None:
    with pytest.raises(PeerFault):
        two(Heard(RIGHT, FramesPassed(2, 1)))


def test_a_stripe_alone_has_no_window(peer: Peer) -> None:
    peer.plan((None, (RIGHT,)))
    peer(LinkUp(RIGHT))
    peer.asked(RIGHT, 2)
    peer(Heard(RIGHT, FramesPassed(2, 0)))
    peer(TableHeld(FORM, SegmentId(0), (SMALL,) * len(MANY)))
    assert bound(peer, peer(FramesFound(FORM, MANY))) == [TABLE, *MANY]


def test_a_relay_tells_how_far_the_middle_child_has_come(relay: Peer) -> None:
    """Both links take a few frames at first; of two children the faster one counts."""
    assert come(relay, range(1, 12)) == [STREAM_FRAMES_MAX]
    assert passed(relay(PeerReady(LEFT))) == [2 * STREAM_FRAMES_MAX]
    assert passed(relay(PeerReady(RIGHT))) == []


def test_who_has_lost_all_children_has_nothing_more_to_pass_on(relay: Peer) -> None:
    come(relay, range(1, 12))
    relay(LinkDown(LEFT, "reset"))
    assert passed(relay(LinkDown(RIGHT, "reset"))) == [12]
    assert come(relay, range(12, 12 + PASS_EVERY)) == [12 + PASS_EVERY]
