"""Which peer gets which message about a version, and when; through the whole machine."""

from dataclasses import replace

from echo2d.core.base.ids import FormId, SegmentId, SessionId
from echo2d.core.broadcast.events import SendRoot
from echo2d.core.broadcast.transmission import TOLD_MAX
from echo2d.core.cluster.events import PeerConnected
from echo2d.core.coordinator.events import DeadlinePassed
from echo2d.core.protocol.control_messages import (
    EncodeVersion,
    Heartbeat,
    PlanEdges,
    SegmentPage,
    SegmentsWanted,
)
from echo2d.core.weights.signed_index import Root
from tests.support.coordinator_world import World, form_of, messages
from tests.support.publishing import deliver_seed, published


def test_roots_and_plans_are_sent_to_every_peer() -> None:
    world = published("a", "b")
    deliver_seed(world)
    roots = [action for action in world.actions if isinstance(action, SendRoot)]
    assert [Root.decode(action.root).totals is not None for action in roots] == [True]
    assert set(roots[0].sessions) == {world.peers["a"].session, world.peers["b"].session}
    for peer in world.peers.values():
        assert len(messages(peer, PlanEdges)) == 1
    secrets = {
        edge.secret: None
        for peer in world.peers.values()
        for part in messages(peer, PlanEdges)
        for edge in part.peers
    }
    assert len(secrets) == 2  # one per edge, the same at both ends


def test_a_large_swarm_gets_its_messages_in_batches() -> None:
    world = published(*(f"w{number}" for number in range(2 * TOLD_MAX)))
    deliver_seed(world)
    assert sum(len(messages(peer, PlanEdges)) for peer in world.peers.values()) == TOLD_MAX
    began = world.now
    while (due := world.state.wake_at()) is not None and due <= began + 1.0:
        world.now = max(world.now, due)
        world.handle(DeadlinePassed())
        world.state.check()
    assert [len(messages(peer, PlanEdges)) for peer in world.peers.values()] == [1] * (
        2 * TOLD_MAX + 1
    )


def test_a_seed_that_joins_late_gets_its_order_then() -> None:
    world = World()
    world.open_session()
    world.publish(0)
    seed = world.connect("seed", kind="seed", slots=0)
    assert messages(seed, EncodeVersion)[0].version == 0
    world.drain()
    whole = replace(seed.hello(), forms=(form_of(world),))
    seed.session = SessionId(99)
    world.handle(
        PeerConnected(seed.session, seed.peer, whole)
    )  # the same daemon, with the form: nothing to do again
    assert len(messages(seed, EncodeVersion)) == 1
    world.connect(
        "seed", kind="seed", slots=0, boot_id="next"
    )  # another one: its sequence numbers start anew
    assert len(messages(seed, EncodeVersion)) == 2
    world.now += 60.0
    world.connect(
        "seed", kind="seed", slots=0, boot_id="next"
    )  # the order may have gone to a session that was over
    assert len(messages(seed, EncodeVersion)) == 3
    plans = [part.plan for part in messages(seed, PlanEdges)]
    assert plans[-1] > plans[0]


def test_a_newcomer_gets_the_newest_root_pages_and_a_place() -> None:
    world = published("a")
    world.drain()
    late = world.connect("late")
    assert messages(late, PlanEdges)
    assert any(
        isinstance(action, SendRoot) and action.sessions == (late.session,)
        for action in world.actions
    )
    world.say(late, SegmentsWanted(form_of(world), SegmentId(0)))
    page: SegmentPage = messages(late, SegmentPage)[0]
    assert len(page.digests) == 1
    world.say(late, SegmentsWanted(FormId("0" * 32), SegmentId(0)))
    assert len(messages(late, SegmentPage)) == 1


def test_a_lost_worker_leaves_the_plan_and_returns_as_a_leaf() -> None:
    world = published("a", "b")
    world.drain()
    while world.now < 8.0:
        world.pass_time(1.0)
        for name in ("seed", "b"):
            world.say(world.peers[name], Heartbeat(0))
    last: PlanEdges = messages(world.peers["b"], PlanEdges)[-1]
    assert last.stripes[0].parent == "seed"
    world.say(world.peers["a"], Heartbeat(0))
    back: PlanEdges = messages(world.peers["a"], PlanEdges)[-1]
    assert (back.stripes[0].parent, back.stripes[0].children) == ("b", ())
    assert back.generation > last.generation
