"""One peer's decisions in the dissemination: a real Relay, checked after every event."""

import pytest

from echo2d.core.ids import FormId, FrameId, Generation, PeerId, PlanId, SegmentId, StripeId, frame_id
from echo2d.core.messages import EdgePeer, PlanEdges, StripeEdge
from echo2d.core.relay import ASKS_MAX, FORMS_MAX, LINK_S, STALL_GAPS, Relay
from echo2d.core.relay_io import (
    DONE,
    Accuse,
    Action,
    CancelHeard,
    CloseStream,
    DeadlinePassed,
    Event,
    ExpectPeer,
    ForgetPeer,
    FormArrived,
    FormComplete,
    FormForgotten,
    FrameRejected,
    FramesFound,
    FrameVerified,
    HaveHeard,
    LinkDown,
    LinkUp,
    OpenStream,
    PeerReady,
    PlanReceived,
    RepairRefused,
    RepairVerified,
    ReportEdgeBroken,
    SendCancel,
    SendFrame,
    SendHave,
    SendWant,
    StreamAsked,
    StreamClosed,
    TableHeld,
    WantHeard,
)
from echo2d.core.repair import QUIET_S, REPAIR_S, WANT_FRAMES_MAX, WANTED_FRAMES_MAX
from echo2d.core.stripes import GAP_DECAY, GAP_START_S, LANE_FRAMES_MAX
from echo2d.errors import PeerFault

FORM = FormId("f" * 32)
ME, UP, LEFT, RIGHT = (PeerId(name) for name in ("m", "a", "x", "y"))  # our id is above UP's, below LEFT's and RIGHT's
TABLE = frame_id(SegmentId(0), 0)
FRAMES = tuple(frame_id(SegmentId(0), index) for index in range(1, 9))
SIZES = (100,) * len(FRAMES)
Edge = tuple[PeerId | None, tuple[PeerId, ...]]


class Peer:
    """A relay under test, with a clock that stands still unless told otherwise."""

    def __init__(self) -> None:
        self.relay = Relay(ME)
        self.now = 100.0

    def __call__(self, event: Event, *, after: float = 0.0) -> list[Action]:
        self.now += after
        actions = self.relay.handle(event, now=self.now)
        self.relay.check()
        return actions

    def plan(self, *edges: Edge, plan: int = 1, generation: int = 0, form: FormId = FORM) -> list[Action]:
        """A plan of equal stripes; each edge is a parent and children."""
        stripes = [StripeEdge(StripeId(n), 1 / len(edges), parent, kids) for n, (parent, kids) in enumerate(edges)]
        others = dict.fromkeys(peer for parent, kids in edges for peer in (parent, *kids) if peer is not None)
        peers = tuple(EdgePeer(peer, None, dial=False, secret=bytes(32)) for peer in others)
        return self(PlanReceived(PlanEdges(form, PlanId(plan), Generation(generation), tuple(stripes), peers)))

    def asked(self, peer: PeerId, stream: int, stripe: int = 0, first: int = 0, plan: int = 1) -> list[Action]:
        return self(StreamAsked(peer, stream, FORM, PlanId(plan), Generation(0), StripeId(stripe), first))

    def comes(self, peer: PeerId, stream: int, sequence: int, frame: FrameId, *, after: float = 0.0) -> list[Action]:
        if frame == TABLE:
            self(TableHeld(FORM, SegmentId(0), SIZES))
        return self(FrameVerified(peer, stream, FORM, frame, sequence, header_only=False), after=after)


@pytest.fixture
def peer() -> Peer:
    return Peer()


@pytest.fixture
def root(peer: Peer) -> Peer:
    """It holds the whole form and has the plan's single stripe's children LEFT and RIGHT linked."""
    peer.plan((None, (LEFT, RIGHT)))
    fill(peer)
    peer(LinkUp(LEFT))
    peer(LinkUp(RIGHT))
    return peer


@pytest.fixture
def follower(peer: Peer) -> Peer:
    """It follows UP on stream 2 and feeds LEFT on stream 2."""
    peer.plan((UP, (LEFT,)))
    peer(LinkUp(UP))
    peer(LinkUp(LEFT))
    peer.asked(LEFT, 2)
    return peer


def fill(peer: Peer, frames: tuple[FrameId, ...] = FRAMES) -> None:
    peer(TableHeld(FORM, SegmentId(0), SIZES))
    peer(FramesFound(FORM, frames))
    peer(FormComplete(FORM, 1))


def frames_to(peer: PeerId, actions: list[Action]) -> list[FrameId]:
    return [action.frame for action in actions if isinstance(action, SendFrame) and action.peer == peer]


def opened(peer: PeerId, stream: int, stripe: int = 0, first: int = 0, generation: int = 0) -> OpenStream:
    return OpenStream(peer, stream, FORM, PlanId(1), Generation(generation), StripeId(stripe), first)


# --- the root ----------------------------------------


def test_the_root_binds_as_much_as_the_lane_takes(root: Peer) -> None:
    sent = root.asked(LEFT, 2)
    assert frames_to(LEFT, sent) == [TABLE, *FRAMES[: LANE_FRAMES_MAX - 1]]
    assert [action.sequence for action in sent if isinstance(action, SendFrame)] == list(range(LANE_FRAMES_MAX))
    assert frames_to(LEFT, root(PeerReady(LEFT))) == list(FRAMES[LANE_FRAMES_MAX - 1 : 2 * LANE_FRAMES_MAX - 1])


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
    assert last[-1] == CloseStream(LEFT, 2, DONE)


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


def test_a_child_that_holds_a_frame_gets_its_header(root: Peer) -> None:
    root(HaveHeard(LEFT, FORM, (TABLE, FRAMES[1])))
    sent = root.asked(LEFT, 2)
    assert [action.header_only for action in sent if isinstance(action, SendFrame)] == [True, False, True, False]


def test_a_root_that_lacks_frames_fetches_them_from_a_child(peer: Peer) -> None:
    peer.plan((None, (LEFT,)))
    fill(peer, FRAMES[:-1])
    peer(LinkUp(LEFT))
    peer(HaveHeard(LEFT, FORM, (FRAMES[-1],)))
    assert peer(DeadlinePassed(), after=1.0) == [SendWant(LEFT, 1, FORM, (FRAMES[-1],))]
    assert peer(RepairVerified(LEFT, FORM, FRAMES[-1])) == [CloseStream(LEFT, 1, DONE), FormArrived(FORM)]


# --- a relay ----------------------------------------


def test_a_relay_tells_what_it_holds_and_opens_where_it_stopped(peer: Peer) -> None:
    peer(TableHeld(FORM, SegmentId(0), SIZES))
    peer(FramesFound(FORM, FRAMES[:2]))
    assert [type(action) for action in peer.plan((UP, ()))] == [ExpectPeer]
    assert peer(LinkUp(UP)) == [SendHave(UP, FORM, (TABLE, *FRAMES[:2])), opened(UP, 2)]


def test_frames_are_passed_on_in_sequence_as_they_come(follower: Peer) -> None:
    assert frames_to(LEFT, follower.comes(UP, 2, 0, TABLE)) == [TABLE]
    assert frames_to(LEFT, follower.comes(UP, 2, 1, FRAMES[4])) == [FRAMES[4]]
    assert follower.comes(UP, 2, 1, FRAMES[4]) == []  # once more: a late duplicate


def test_a_child_may_begin_anywhere(follower: Peer) -> None:
    follower.comes(UP, 2, 0, TABLE)
    follower.comes(UP, 2, 1, FRAMES[0])
    again = follower.asked(LEFT, 4, first=1)
    assert again[0] == CloseStream(LEFT, 2, "asked for again")
    assert frames_to(LEFT, again) == [FRAMES[0]]
    follower(PeerReady(LEFT))
    follower.asked(LEFT, 6, first=3)  # it knows more of the stripe than we do
    assert frames_to(LEFT, follower.comes(UP, 2, 2, FRAMES[1])) == []
    assert frames_to(LEFT, follower.comes(UP, 2, 3, FRAMES[2])) == [FRAMES[2]]


def test_the_end_of_a_stripe_is_passed_on_after_its_last_frame(follower: Peer) -> None:
    for sequence, frame in enumerate((TABLE, *FRAMES)):
        follower.comes(UP, 2, sequence, frame)
    assert follower(StreamClosed(UP, 2, DONE)) == []
    assert CloseStream(LEFT, 2, DONE) not in follower(PeerReady(LEFT))
    assert follower(PeerReady(LEFT))[-1] == CloseStream(LEFT, 2, DONE)


def test_the_form_arrives_once_everything_is_held_and_the_end_is_known(follower: Peer) -> None:
    for sequence, frame in enumerate((TABLE, *FRAMES)):
        assert FormArrived(FORM) not in follower.comes(UP, 2, sequence, frame)
    assert follower(FormComplete(FORM, 1)) == [FormArrived(FORM)]
    assert follower(FormComplete(FORM, 1)) == []


@pytest.mark.parametrize(
    ("sequence", "frame", "header_only"),
    [(2, FRAMES[0], False), (1, FRAMES[0], True), (1, TABLE, False)],
    ids=["hole", "header of a frame not held", "twice"],
)
def test_what_no_honest_parent_sends_is_its_fault(
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


def test_a_stripe_from_before_its_beginning_is_the_childs_fault(follower: Peer) -> None:
    with pytest.raises(PeerFault):
        follower.asked(LEFT, 4, first=-1)


# --- plans ----------------------------------------


def test_a_new_generation_moves_only_what_changed(follower: Peer) -> None:
    follower.comes(UP, 2, 0, TABLE)
    actions = follower.plan((RIGHT, (LEFT,)), generation=1)
    assert actions[:2] == [ForgetPeer(UP), ExpectPeer(EdgePeer(RIGHT, None, dial=False, secret=bytes(32)))]
    assert actions[2:] == [CloseStream(UP, 2, "not the parent any more")]
    assert follower(LinkUp(RIGHT)) == [SendHave(RIGHT, FORM, (TABLE,)), opened(RIGHT, 1, first=1, generation=1)]
    assert frames_to(LEFT, follower.comes(RIGHT, 1, 1, FRAMES[0])) == [FRAMES[0]]


def test_an_older_generation_is_ignored(follower: Peer) -> None:
    follower.plan((UP, (LEFT,)), generation=2)
    assert follower.plan((RIGHT, ()), generation=1) == []
    assert follower.plan((RIGHT, ()), plan=0, generation=7) == []


def test_a_new_plan_begins_anew_and_knows_what_is_held(follower: Peer) -> None:
    follower.comes(UP, 2, 0, TABLE)
    actions = follower.plan((UP, (LEFT,)), plan=2)
    assert actions[:2] == [CloseStream(UP, 2, "another plan"), CloseStream(LEFT, 2, "another plan")]
    assert actions[2:] == [
        SendHave(UP, FORM, (TABLE,)),
        OpenStream(UP, 4, FORM, PlanId(2), Generation(0), StripeId(0), 0),
    ]
    follower.asked(LEFT, 4, plan=2)
    passed = follower(FrameVerified(UP, 4, FORM, TABLE, 0, header_only=True))
    assert passed == [SendFrame(LEFT, 4, FORM, TABLE, 0, header_only=False)]


def test_a_stream_asked_before_the_plan_comes_is_served_then(peer: Peer) -> None:
    fill(peer)
    peer(LinkUp(LEFT))
    assert peer.asked(LEFT, 2) == []
    assert frames_to(LEFT, peer.plan((None, (LEFT,)))) == [TABLE, *FRAMES[:3]]


def test_streams_of_strangers_and_of_the_past_are_refused(follower: Peer) -> None:
    follower(LinkUp(RIGHT))
    assert follower.asked(RIGHT, 2) == [CloseStream(RIGHT, 2, "not a child in this plan")]
    assert follower.asked(LEFT, 4, plan=0) == [CloseStream(LEFT, 4, "not a child in this plan")]


def test_streams_that_wait_for_a_plan_are_bounded(peer: Peer) -> None:
    peer(LinkUp(LEFT))
    for number in range(ASKS_MAX):
        assert peer.asked(LEFT, 2 * number + 2, stripe=number) == []
    assert peer.asked(LEFT, 400, stripe=999) == [CloseStream(LEFT, 400, "not a child in this plan")]


def test_the_oldest_form_makes_room(follower: Peer) -> None:
    for number in range(FORMS_MAX - 1):
        follower.plan((UP, ()), form=FormId(f"{number:032x}"))
    actions = follower.plan((UP, ()), form=FormId("e" * 32))
    assert CloseStream(UP, 2, "form forgotten") in actions
    assert CloseStream(LEFT, 2, "form forgotten") in actions
    assert ForgetPeer(LEFT) in actions
    assert follower.relay.transfer(FORM) is None


def test_a_forgotten_form_leaves_nothing(follower: Peer) -> None:
    assert follower(FormForgotten(FORM)) == [
        CloseStream(UP, 2, "form forgotten"),
        CloseStream(LEFT, 2, "form forgotten"),
        ForgetPeer(UP),
        ForgetPeer(LEFT),
    ]
    assert follower(FrameVerified(UP, 2, FORM, TABLE, 0, header_only=False)) == []
    assert follower(FormForgotten(FORM)) == []


# --- trouble ----------------------------------------


def test_a_lost_parent_is_reported_and_asked_again_when_it_is_back(follower: Peer) -> None:
    follower.comes(UP, 2, 0, TABLE)
    assert follower(LinkDown(UP, "reset")) == [ReportEdgeBroken(PlanId(1), Generation(0), UP, "reset")]
    assert follower(LinkUp(UP)) == [SendHave(UP, FORM, (TABLE,)), opened(UP, 2, first=1)]


def test_a_lost_child_is_reported_unless_it_has_everything(root: Peer) -> None:
    root.asked(LEFT, 2)
    assert root(LinkDown(LEFT, "reset")) == [ReportEdgeBroken(PlanId(1), Generation(0), LEFT, "reset")]
    root.asked(RIGHT, 2)
    root(PeerReady(RIGHT))
    root(PeerReady(RIGHT))
    assert root(LinkDown(RIGHT, "reset")) == []


def test_a_parent_that_stands_still_is_reported_once(follower: Peer) -> None:
    follower.comes(UP, 2, 0, TABLE)
    for sequence, frame in enumerate(FRAMES[:7], start=1):
        follower.comes(UP, 2, sequence, frame, after=0.1)
    expected_gap = GAP_START_S * GAP_DECAY**8
    assert follower(DeadlinePassed(), after=STALL_GAPS * expected_gap - 0.01) == []
    assert follower(DeadlinePassed(), after=0.02) == [ReportEdgeBroken(PlanId(1), Generation(0), UP, "stalled")]
    assert follower(DeadlinePassed(), after=60.0) == []


def test_silence_is_no_stall_when_everything_known_is_held(follower: Peer) -> None:
    for sequence, frame in enumerate((TABLE, *FRAMES)):
        follower.comes(UP, 2, sequence, frame)
    assert follower(DeadlinePassed(), after=600.0) == []


def test_a_parent_that_sends_another_stripe_is_not_accused(peer: Peer) -> None:
    peer.plan((UP, ()), (UP, ()))
    peer(LinkUp(UP))
    peer.comes(UP, 2, 0, TABLE)
    peer.comes(UP, 4, 0, TABLE, after=100.0)
    assert peer(DeadlinePassed(), after=0.9) == []


def test_a_parent_without_a_link_is_reported_in_time(peer: Peer) -> None:
    peer.plan((UP, ()))
    assert peer(DeadlinePassed(), after=LINK_S - 0.1) == []
    assert peer(DeadlinePassed(), after=0.2) == [ReportEdgeBroken(PlanId(1), Generation(0), UP, "no link")]


def test_a_parent_that_refuses_is_reported_and_asked_again_later(follower: Peer) -> None:
    refused = follower(StreamClosed(UP, 2, "not a child in this plan"))
    assert refused == [ReportEdgeBroken(PlanId(1), Generation(0), UP, "not a child in this plan")]
    assert opened(UP, 4) in follower(DeadlinePassed(), after=LINK_S)


def test_alarms_stop_when_nothing_is_to_come(follower: Peer) -> None:
    assert follower.relay.wake_at() is not None
    for sequence, frame in enumerate((TABLE, *FRAMES)):
        follower.comes(UP, 2, sequence, frame)
    follower(FormComplete(FORM, 1))
    follower(StreamClosed(UP, 2, DONE))
    follower(DeadlinePassed(), after=1.0)
    assert follower.relay.wake_at() is None


def test_a_bad_frame_accuses_its_parent_and_ends_the_stream(follower: Peer) -> None:
    follower.comes(UP, 2, 0, TABLE)
    assert follower(FrameRejected(UP, 2, FORM, FRAMES[0])) == [
        Accuse(FORM, FRAMES[0], UP),
        CloseStream(UP, 2, "bad frame"),
        ReportEdgeBroken(PlanId(1), Generation(0), UP, "bad frame"),
    ]
    assert opened(UP, 4, first=1, generation=1) in follower.plan((UP, (LEFT,)), generation=1)


# --- repair ----------------------------------------


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
