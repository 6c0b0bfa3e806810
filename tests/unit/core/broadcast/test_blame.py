"""Broken edges and bad frames: which peer becomes a leaf, and which is quarantined; through the whole machine."""

from dataclasses import replace

from echo2d.core.base.ids import FrameId, Generation, PeerId, PlanId
from echo2d.core.broadcast.transmission import Transmission
from echo2d.core.cluster.quarantine import ALONE_MAX, MISREPORTS_MAX, QUARANTINE_S
from echo2d.core.coordinator.events import DeadlinePassed
from echo2d.core.protocol.control_messages import (
    EdgeBroken,
    FrameAccused,
    Heartbeat,
    PlanEdges,
)
from echo2d_lab.standins.memory_run import FakePeer
from tests.support.catch_up import newcomer, running, taken_order
from tests.support.coordinator_world import World, form_of, messages, publish_step
from tests.support.publishing import deliver_seed, publish_again, published


def test_a_broken_edge_is_repaired_once() -> None:
    world = published("a", "b", "c")
    world.drain()
    edges = {name: messages(world.peers[name], PlanEdges)[-1] for name in ("a", "b", "c")}
    child = next(
        name for name, part in edges.items() if part.stripes[0].parent not in (None, "seed")
    )
    parent = edges[child].stripes[0].parent
    assert parent is not None
    report = EdgeBroken(edges[child].plan, edges[child].generation, parent, "reset")
    world.say(world.peers[child], report)
    assert messages(world.peers[parent], PlanEdges)[-1].stripes[0].children == ()
    count = len(messages(world.peers[child], PlanEdges))
    world.say(world.peers[child], report)  # of a generation that is over
    world.say(world.peers[child], EdgeBroken(PlanId(1), Generation(0), parent, "reset"))
    assert len(messages(world.peers[child], PlanEdges)) == count


def test_a_worker_that_reports_no_link_to_the_seed_is_moved_itself() -> None:
    world = published("a", "b")
    world.drain()
    edges = {name: messages(world.peers[name], PlanEdges)[-1] for name in ("a", "b")}
    first = next(name for name, part in edges.items() if part.stripes[0].parent == "seed")
    world.say(
        world.peers[first],
        EdgeBroken(edges[first].plan, edges[first].generation, world.peers["seed"].peer, "refused"),
    )
    assert messages(world.peers[first], PlanEdges)[-1].stripes[0].parent != "seed"


def test_accused_relays_become_leaves() -> None:
    world = published("a", "b")
    world.drain()
    edges = {name: messages(world.peers[name], PlanEdges)[-1] for name in ("a", "b")}
    parent = next(name for name, part in edges.items() if part.stripes[0].children)
    child = edges[parent].stripes[0].children[0]
    world.say(
        world.peers[child], FrameAccused(form_of(world), FrameId(1), world.peers[parent].peer)
    )
    assert messages(world.peers[parent], PlanEdges)[-1].stripes[0].children == ()


def test_a_peer_that_shares_no_edge_accuses_no_other_one() -> None:
    world = published("a", "b", "c")
    world.drain()
    edges = {name: messages(world.peers[name], PlanEdges)[-1] for name in ("a", "b", "c")}
    assert (edges["a"].stripes[0].parent, edges["a"].stripes[0].children) == ("seed", ("b",))
    told = sum(len(messages(peer, PlanEdges)) for peer in world.peers.values())
    first, last = world.peers["a"], world.peers["c"]
    world.say(last, EdgeBroken(edges["c"].plan, edges["c"].generation, first.peer, "reset"))
    world.say(last, FrameAccused(form_of(world), FrameId(1), first.peer))
    assert sum(len(messages(peer, PlanEdges)) for peer in world.peers.values()) == told


def test_a_peer_that_invents_many_accusations_is_quarantined_and_ignored() -> None:
    world = published("a", "b", "c")
    world.drain()
    first, last = world.peers["a"], world.peers["c"]
    for _ in range(MISREPORTS_MAX):
        world.say(last, FrameAccused(form_of(world), FrameId(1), first.peer))
        world.pass_time(1.0)
    [alert] = [each for each in world.state.status().alerts if each.kind == "worker_misreports"]
    assert alert.subject == "c"
    counted = world.state.status().fault_counts["frame"]
    world.say(last, FrameAccused(form_of(world), FrameId(1), first.peer))
    assert world.state.status().fault_counts["frame"] == counted


def parents_of(transmission: Transmission, child: PeerId) -> set[PeerId]:
    assert transmission.plan is not None
    return {parent for parent, below in transmission.plan.shares if below == child}


def test_a_peer_that_accuses_all_its_parents_becomes_a_leaf_itself() -> None:
    world = published("a", "b", "c", "d", "e")
    deliver_seed(world)
    transmission = world.state._publishing.spreading
    assert transmission is not None
    liar = world.peers["c"]
    accused = []
    for _ in range(ALONE_MAX):
        (parent,) = parents_of(transmission, liar.peer)
        accused.append(parent)
        world.say(liar, FrameAccused(form_of(world), FrameId(1), parent))
    assert len(set(accused)) == ALONE_MAX
    before = messages(liar, PlanEdges)[-1].stripes[0]
    for _ in range(3):
        (parent,) = parents_of(transmission, liar.peer)
        world.say(liar, FrameAccused(form_of(world), FrameId(1), parent))
    after = messages(liar, PlanEdges)[-1].stripes[0]
    assert (after.children, after.parent != before.parent or not before.children) == ((), True)
    assert transmission.repairs == ALONE_MAX + 1
    assert transmission.plan is not None
    assert {one.peer for one in transmission.plan.peers if one.receive_only} == {
        *accused,
        liar.peer,
    }


def test_a_relay_that_two_peers_accuse_is_quarantined_and_passes_nothing_on() -> None:
    world = published("a", "b", "c")
    world.drain()
    culprit, accusers = world.peers["a"], [world.peers["b"], world.peers["c"]]
    for number, accuser in enumerate(accusers):
        place_below(world, culprit, accuser)
        world.say(accuser, FrameAccused(form_of(world), FrameId(1), culprit.peer))
        assert quarantined(world) == (["a"] if number else [])
        publish_again(world)
        world.drain()
    assert messages(culprit, PlanEdges)[-1].stripes[0].children == ()
    assert "a is quarantined" in world.state.status().attention[0]
    world.now += QUARANTINE_S
    for peer in world.peers.values():
        world.say(peer, Heartbeat(0))
    world.handle(DeadlinePassed())
    assert quarantined(world) == []
    publish_again(world)
    world.drain()
    assert any(messages(peer, PlanEdges)[-1].stripes[0].parent == "a" for peer in accusers)


def test_one_bad_frame_seen_by_the_seed_is_enough_for_quarantine() -> None:
    world = published("a", "b")
    world.drain()
    transmission = world.state._publishing.spreading
    assert transmission is not None
    (first,) = transmission.neighbours(PeerId("seed"))
    world.say(world.peers["seed"], FrameAccused(form_of(world), FrameId(1), first))
    assert quarantined(world) == [first]


def quarantined(world: World) -> list[str]:
    return [worker.id for worker in world.state.status().workers if worker.quarantined]


def place_below(world: World, parent: FakePeer, child: FakePeer) -> None:
    """The plan has this edge, whatever else it has."""
    transmission = world.state._publishing.spreading
    assert transmission is not None
    assert transmission.plan is not None
    if child.peer not in transmission.neighbours(parent.peer):
        sources = {**transmission.plan.sources, child.peer: (parent.peer,)}
        transmission.plan = replace(transmission.plan, sources=sources)


def test_a_worker_that_takes_another_form_accuses_no_peer() -> None:
    """It has no place in the plan of the form that it names; the coordinator ended with a KeyError."""
    world = running("a", "b")
    publish_step(world, 2)
    deliver_seed(world)
    spreading, accused = form_of(world), world.peers["a"].peer
    late = newcomer(world, "late")
    assert taken_order(world).form != spreading
    world.say(late, FrameAccused(spreading, FrameId(0), accused))
    assert world.state.status().faults[-1].kind == "frame"
