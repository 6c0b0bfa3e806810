"""One peer in the dissemination: its plans, and what it allows other peers."""

from echo2d.core.base.ids import FormId, Generation, PlanId, StripeId
from echo2d.core.protocol.control_messages import EdgePeer
from echo2d.core.protocol.peer_messages import StreamEnded, StreamOpened
from echo2d.core.relay.events import (
    ExpectPeer,
    ForgetPeer,
    FormForgotten,
    FramesFound,
    FrameVerified,
    LinkUp,
    RepairVerified,
    SendFrame,
    Tell,
)
from echo2d.core.relay.relay import ASKS_MAX
from echo2d.core.relay.stripes import STRIPED_FORMS_MAX
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
    opened,
)


def test_a_new_generation_changes_only_the_edges_that_differ(follower: Peer) -> None:
    follower.comes(UP, 2, 0, TABLE)
    actions = follower.plan((RIGHT, (LEFT,)), generation=1)
    assert actions[:2] == [
        ForgetPeer(UP),
        ExpectPeer(EdgePeer(RIGHT, None, dial=False, secret=bytes(32))),
    ]
    assert actions[2:] == [Tell(UP, StreamEnded(2, "not the parent any more"))]
    assert follower(LinkUp(RIGHT)) == [
        Tell(RIGHT, held((TABLE,))),
        opened(RIGHT, 1, first=1, generation=1),
    ]
    assert frames_to(LEFT, follower.comes(RIGHT, 1, 1, FRAMES[0])) == [FRAMES[0]]


def test_an_older_generation_is_ignored(follower: Peer) -> None:
    follower.plan((UP, (LEFT,)), generation=2)
    assert follower.plan((RIGHT, ()), generation=1) == []


def test_the_plan_of_a_restarted_coordinator_counts_with_any_number(follower: Peer) -> None:
    actions = follower.plan((RIGHT, ()), plan=0)
    assert Tell(UP, StreamEnded(2, "another plan")) in actions
    assert follower(LinkUp(RIGHT))[-1] == Tell(
        RIGHT, StreamOpened(1, FORM, PlanId(0), Generation(0), StripeId(0), 0)
    )
    assert follower.asked(LEFT, 6, plan=3) == [], "its plan may still be on its way here"


def test_a_new_plan_ends_the_old_streams_and_keeps_the_held_frames(follower: Peer) -> None:
    follower.comes(UP, 2, 0, TABLE)
    actions = follower.plan((UP, (LEFT,)), plan=2)
    assert actions[:2] == [
        Tell(UP, StreamEnded(2, "another plan")),
        Tell(LEFT, StreamEnded(2, "another plan")),
    ]
    assert actions[2:] == [
        Tell(UP, held((TABLE,))),
        Tell(UP, StreamOpened(4, FORM, PlanId(2), Generation(0), StripeId(0), 0)),
    ]
    follower.asked(LEFT, 4, plan=2)
    passed = follower(FrameVerified(UP, 4, FORM, TABLE, 0, header_only=True))
    assert passed == [SendFrame(LEFT, 4, FORM, TABLE, 0, header_only=False)]


def test_a_stream_requested_before_the_plan_is_served_when_the_plan_arrives(peer: Peer) -> None:
    fill(peer)
    peer(LinkUp(LEFT))
    assert peer.asked(LEFT, 2) == []
    assert frames_to(LEFT, peer.plan((None, (LEFT,)))) == [TABLE, FRAMES[0]]


def test_streams_of_strangers_are_refused(follower: Peer) -> None:
    follower(LinkUp(RIGHT))
    assert follower.asked(RIGHT, 2) == [Tell(RIGHT, StreamEnded(2, "not a child in this plan"))]


def test_the_number_of_streams_that_wait_for_a_plan_is_limited(peer: Peer) -> None:
    peer(LinkUp(LEFT))
    for number in range(ASKS_MAX):
        assert peer.asked(LEFT, 2 * number + 2, stripe=number) == []
    assert peer.asked(LEFT, 400, stripe=999) == [
        Tell(LEFT, StreamEnded(400, "not a child in this plan"))
    ]


def test_the_oldest_form_makes_room(follower: Peer) -> None:
    for number in range(STRIPED_FORMS_MAX - 1):
        follower.plan((UP, ()), form=FormId(f"{number:032x}"))
    actions = follower.plan((UP, ()), form=FormId("e" * 32))
    assert Tell(UP, StreamEnded(2, "form forgotten")) in actions
    assert Tell(LEFT, StreamEnded(2, "form forgotten")) in actions
    assert ForgetPeer(LEFT) in actions
    assert follower.relay.transfer(FORM) is None


def test_a_forgotten_form_leaves_nothing(follower: Peer) -> None:
    assert follower(FormForgotten(FORM)) == [
        Tell(UP, StreamEnded(2, "form forgotten")),
        Tell(LEFT, StreamEnded(2, "form forgotten")),
        ForgetPeer(UP),
        ForgetPeer(LEFT),
    ]
    assert follower(FrameVerified(UP, 2, FORM, TABLE, 0, header_only=False)) == []
    assert follower(FormForgotten(FORM)) == []


def test_frames_of_a_form_that_was_forgotten_meanwhile_are_ignored(follower: Peer) -> None:
    follower.comes(UP, 2, 0, TABLE)
    follower(FormForgotten(FORM))
    assert follower(FramesFound(FORM, FRAMES[:1])) == []
    assert follower(FrameVerified(UP, 2, FORM, FRAMES[1], 1, header_only=False)) == []
    assert follower(RepairVerified(UP, FORM, FRAMES[2])) == []
