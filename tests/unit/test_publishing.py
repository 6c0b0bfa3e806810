"""Which version spreads, and what the seed and the receivers are told; through the whole machine."""

import math
from dataclasses import replace
from typing import Any

import pytest

from echo2d.core import publishing
from echo2d.core.coordinator_io import DeadlinePassed, DeleteVersion, PeerConnected, PeerSaid, SendRoot, SessionId
from echo2d.core.ids import Digest, FormId, FrameId, Generation, PeerId, PlanId, SegmentId, Version
from echo2d.core.messages import (
    ApplyFailed,
    Backlog,
    EdgeBroken,
    EncodeFailed,
    EncodeVersion,
    ForgetForm,
    FormEncoded,
    FrameAccused,
    Heartbeat,
    LinkSample,
    PlanEdges,
    SegmentEncoded,
    SegmentPage,
    SegmentsWanted,
    TransferReport,
    VersionVerified,
)
from echo2d.core.publishing import ENCODE_FAILURES_MAX, ENCODE_RETRY_S, FIXED_S
from echo2d.core.quarantine import ALONE_MAX, QUARANTINE_S
from echo2d.core.rates import PACE
from echo2d.core.roots import Root
from echo2d.core.spread import LEARN_S, TOLD_MAX, Spread
from tests.coordinator_world import Peer, World, form_of, messages, publish_step, rules, train, version_digest
from tests.plan_kit import MB


def published(*workers: str, kind: str = "chain") -> World:
    """Version 0 is being encoded; nothing has arrived yet."""
    world = World(rules(shape=kind))
    world.connect("seed", kind="seed", slots=0)
    for name in workers:
        world.connect(name)
    world.drain()
    world.open_session()
    world.publish(0)
    world.pending = [event for event in world.pending if isinstance(event, PeerSaid)]
    return world


def broadcast(world: World) -> dict[str, Any]:
    found: dict[str, Any] = world.state.status()["broadcast"]
    return found


def publish_again(world: World) -> FormId:
    """The next publish: version 0 of a new epoch. The form that spread before it."""
    form = form_of(world)
    world.open_session()
    world.publish(0)
    return form


def deliver_seed(world: World) -> None:
    """The seed's reports, and nothing that follows from them."""
    for event in list(world.pending):
        if isinstance(event, PeerSaid) and isinstance(event.message, SegmentEncoded | FormEncoded):
            world.pending.remove(event)
            world.handle(event)


def test_roots_and_plans_go_to_everyone() -> None:
    world = published("a", "b")
    deliver_seed(world)
    roots = [action for action in world.actions if isinstance(action, SendRoot)]
    assert [Root.decode(action.root).totals is not None for action in roots] == [True]
    assert set(roots[0].sessions) == {world.peers["a"].session, world.peers["b"].session}
    for peer in world.peers.values():
        assert len(messages(peer, PlanEdges)) == 1
    secrets = {
        edge.secret: None for peer in world.peers.values() for part in messages(peer, PlanEdges) for edge in part.peers
    }
    assert len(secrets) == 2  # one per edge, the same at both ends


def test_a_large_swarm_is_told_in_turns() -> None:
    world = published(*(f"w{number}" for number in range(2 * TOLD_MAX)))
    deliver_seed(world)
    assert sum(len(messages(peer, PlanEdges)) for peer in world.peers.values()) == TOLD_MAX
    began = world.now
    while (due := world.state.wake_at()) is not None and due <= began + 1.0:
        world.now = max(world.now, due)
        world.handle(DeadlinePassed())
        world.state.check()
    assert [len(messages(peer, PlanEdges)) for peer in world.peers.values()] == [1] * (2 * TOLD_MAX + 1)


def test_a_seed_that_comes_late_gets_its_order_then() -> None:
    world = World()
    world.open_session()
    world.publish(0)
    seed = world.connect("seed", kind="seed", slots=0)
    assert messages(seed, EncodeVersion)[0].version == 0
    world.drain()
    whole = replace(seed.hello(), forms=(form_of(world),))
    seed.session = SessionId(99)
    world.handle(PeerConnected(seed.session, seed.peer, whole))  # the same daemon, with the form: nothing to do again
    assert len(messages(seed, EncodeVersion)) == 1
    world.connect("seed", kind="seed", slots=0, boot_id="next")  # another one: its sequence numbers start anew
    assert len(messages(seed, EncodeVersion)) == 2
    world.now += 60.0
    world.connect("seed", kind="seed", slots=0, boot_id="next")  # the order may have gone to a session that was over
    assert len(messages(seed, EncodeVersion)) == 3
    plans = [part.plan for part in messages(seed, PlanEdges)]
    assert plans[-1] > plans[0]


def test_a_newcomer_gets_the_newest_root_pages_and_a_place() -> None:
    world = published("a")
    world.drain()
    late = world.connect("late")
    assert messages(late, PlanEdges)
    assert any(isinstance(action, SendRoot) and action.sessions == (late.session,) for action in world.actions)
    world.say(late, SegmentsWanted(form_of(world), SegmentId(0)))
    page: SegmentPage = messages(late, SegmentPage)[0]
    assert len(page.digests) == 1
    world.say(late, SegmentsWanted(FormId("0" * 32), SegmentId(0)))
    assert len(messages(late, SegmentPage)) == 1


def test_one_spreads_and_the_newest_waits() -> None:
    world = World()
    world.connect("seed", kind="seed", slots=0)
    world.connect("a")
    world.connect("b")
    train(world, 3)
    for step in (4, 5):  # their groups are buffered; version 3 is still being encoded
        reply = world.replies[world.ask_batch(step)]
        assert reply.digest is not None
        world.commit(step, reply.digest)
        assert world.publish(step).status == 200
    assert (broadcast(world)["version"], broadcast(world)["waiting_version"]) == (3, 5)
    old = form_of(world)
    world.drain()
    assert broadcast(world)["version"] == 5
    versions = [order.version for order in messages(world.peers["seed"], EncodeVersion)]
    assert versions[-4:] == [1, 2, 3, 5]
    assert messages(world.peers["seed"], ForgetForm)[-1].form == old


def test_slow_workers_do_not_hold_up_the_next_version() -> None:
    world = published("a", "b")
    deliver_seed(world)
    key = world.peers["a"].ready
    assert key is not None
    old = publish_again(world)
    world.pass_time(FIXED_S + 1.0)
    assert broadcast(world)["form"] == old  # nobody has it
    world.say(world.peers["a"], VersionVerified(old, key.version, key.digest))
    assert broadcast(world)["form"] != old


def test_a_worker_that_cannot_apply_is_not_waited_for() -> None:
    world = published("a", "b")
    deliver_seed(world)
    key = world.peers["a"].ready
    assert key is not None
    old = publish_again(world)
    world.say(world.peers["a"], VersionVerified(old, key.version, key.digest))
    world.say(world.peers["b"], ApplyFailed(old, "disk full"))
    assert broadcast(world)["form"] != old
    assert "disk full" in world.state.status()["faults"][-1]["text"]


def test_a_worker_that_cannot_apply_gets_another_chance_and_another_one_later() -> None:
    world = published("a")
    deliver_seed(world)
    peer = world.peers["a"]
    for delay_s in (10.0, 20.0, 40.0, 80.0, 160.0, 160.0):
        world.say(peer, ApplyFailed(form_of(world), "disk full"))
        told, failed_at, roots = len(messages(peer, PlanEdges)), world.now, 0
        while len(messages(peer, PlanEdges)) == told:
            world.pass_time(1.0)
            roots += sum(isinstance(action, SendRoot) for action in world.actions)
            world.say(peer, Heartbeat(0))
        assert (world.now - failed_at, roots) == (delay_s, 1)


def test_a_worker_that_cannot_apply_becomes_a_leaf_once() -> None:
    world = published("a", "b", "c")
    deliver_seed(world)
    first: PlanEdges = messages(world.peers["a"], PlanEdges)[-1]
    assert first.stripes[0].children == ("b",)
    world.say(world.peers["a"], ApplyFailed(form_of(world), "disk full"))
    leaf: PlanEdges = messages(world.peers["a"], PlanEdges)[-1]
    assert (leaf.stripes[0].parent, leaf.stripes[0].children) == ("c", ())
    world.say(world.peers["b"], ApplyFailed(form_of(world), "disk full"))
    told = len(messages(world.peers["a"], PlanEdges))
    world.say(world.peers["a"], ApplyFailed(form_of(world), "disk full"))
    assert len(messages(world.peers["a"], PlanEdges)) == told


def test_a_lost_worker_leaves_the_plan_and_comes_back_as_a_leaf() -> None:
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


def test_a_broken_edge_mends_the_plan_once() -> None:
    world = published("a", "b", "c")
    world.drain()
    edges = {name: messages(world.peers[name], PlanEdges)[-1] for name in ("a", "b", "c")}
    child = next(name for name, part in edges.items() if part.stripes[0].parent not in (None, "seed"))
    parent = edges[child].stripes[0].parent
    assert parent is not None
    report = EdgeBroken(edges[child].plan, edges[child].generation, parent, "reset")
    world.say(world.peers[child], report)
    assert messages(world.peers[parent], PlanEdges)[-1].stripes[0].children == ()
    count = len(messages(world.peers[child], PlanEdges))
    world.say(world.peers[child], report)  # of a generation that is over
    world.say(world.peers[child], EdgeBroken(PlanId(1), Generation(0), parent, "reset"))
    assert len(messages(world.peers[child], PlanEdges)) == count


def test_a_worker_without_a_link_to_the_seed_moves_itself() -> None:
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
    world.say(world.peers[child], FrameAccused(form_of(world), FrameId(1), world.peers[parent].peer))
    assert messages(world.peers[parent], PlanEdges)[-1].stripes[0].children == ()


def test_who_shares_no_edge_accuses_nobody() -> None:
    world = published("a", "b", "c")
    world.drain()
    edges = {name: messages(world.peers[name], PlanEdges)[-1] for name in ("a", "b", "c")}
    assert (edges["a"].stripes[0].parent, edges["a"].stripes[0].children) == ("seed", ("b",))
    told = sum(len(messages(peer, PlanEdges)) for peer in world.peers.values())
    first, last = world.peers["a"], world.peers["c"]
    world.say(last, EdgeBroken(edges["c"].plan, edges["c"].generation, first.peer, "reset"))
    world.say(last, FrameAccused(form_of(world), FrameId(1), first.peer))
    assert sum(len(messages(peer, PlanEdges)) for peer in world.peers.values()) == told


def parents_of(spread: Spread, child: PeerId) -> set[PeerId]:
    assert spread.plan is not None
    return {parent for parent, below in spread.plan.shares if below == child}


def test_who_accuses_all_its_parents_becomes_a_leaf_itself() -> None:
    world = published("a", "b", "c", "d", "e")
    deliver_seed(world)
    spread = world.state._publishing.spreading
    assert spread is not None
    liar = world.peers["c"]
    accused = []
    for _ in range(ALONE_MAX):
        (parent,) = parents_of(spread, liar.peer)
        accused.append(parent)
        world.say(liar, FrameAccused(form_of(world), FrameId(1), parent))
    assert len(set(accused)) == ALONE_MAX
    before = messages(liar, PlanEdges)[-1].stripes[0]
    for _ in range(3):
        (parent,) = parents_of(spread, liar.peer)
        world.say(liar, FrameAccused(form_of(world), FrameId(1), parent))
    after = messages(liar, PlanEdges)[-1].stripes[0]
    assert (after.children, after.parent != before.parent or not before.children) == ((), True)
    assert spread.repairs == ALONE_MAX + 1
    assert spread.plan is not None
    assert {one.peer for one in spread.plan.peers if one.receive_only} == {*accused, liar.peer}


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
    assert "a is quarantined" in world.state.status()["attention"][0]
    world.now += QUARANTINE_S
    for peer in world.peers.values():
        world.say(peer, Heartbeat(0))
    world.handle(DeadlinePassed())
    assert quarantined(world) == []
    publish_again(world)
    world.drain()
    assert any(messages(peer, PlanEdges)[-1].stripes[0].parent == "a" for peer in accusers)


def test_what_the_seed_itself_saw_is_enough() -> None:
    world = published("a", "b")
    world.drain()
    spread = world.state._publishing.spreading
    assert spread is not None
    (first,) = spread.neighbours(PeerId("seed"))
    world.say(world.peers["seed"], FrameAccused(form_of(world), FrameId(1), first))
    assert quarantined(world) == [first]


def test_nobody_waits_for_a_quarantined_worker() -> None:
    world = published("a", "b")
    deliver_seed(world)
    spread = world.state._publishing.spreading
    assert spread is not None
    (first,) = spread.neighbours(PeerId("seed"))
    (other,) = {"a", "b"} - {first}
    world.say(world.peers["seed"], FrameAccused(form_of(world), FrameId(1), first))
    world.say(world.peers[other], VersionVerified(form_of(world), Version(0), version_digest(0)))
    assert not world.state._publishing._awaits_anyone(spread)
    assert len(world.state.status()["t_verify_s"]) == 1


def quarantined(world: World) -> list[str]:
    return [worker["id"] for worker in world.state.status()["workers"] if worker["quarantined"]]


def place_below(world: World, parent: Peer, child: Peer) -> None:
    """The plan has this edge, whatever else it has."""
    spread = world.state._publishing.spreading
    assert spread is not None
    assert spread.plan is not None
    if child.peer not in spread.neighbours(parent.peer):
        sources = {**spread.plan.sources, child.peer: (parent.peer,)}
        spread.plan = replace(spread.plan, sources=sources)


def test_encoding_is_tried_again_and_then_given_up() -> None:
    world = published("a")
    world.pending.clear()
    seed = world.peers["seed"]
    for number in range(1, ENCODE_FAILURES_MAX):
        world.say(seed, EncodeFailed(form_of(world), "disk full"))
        assert len(messages(seed, EncodeVersion)) == number
        world.pass_time(ENCODE_RETRY_S)
        assert len(messages(seed, EncodeVersion)) == number + 1
        world.pending.clear()
    world.say(seed, EncodeFailed(form_of(world), "disk full"))
    assert world.stopped == "version 0 cannot be encoded: disk full"


def serving(*workers: str) -> World:
    """They serve version 1, and version 2 is whole at the seed; nobody has it."""
    world = World(rules(shape="chain", staleness_max=2))
    world.connect("seed", kind="seed", slots=0)
    for name in workers:
        world.connect(name)
    train(world, 1)
    publish_step(world, 2)
    deliver_seed(world)
    world.pending.clear()
    for peer in world.peers.values():
        peer.ready = None
    return world


def fail_for_good(world: World) -> FormId:
    """The seed has lost a frame, and cannot encode the form again."""
    seed, form = world.peers["seed"], form_of(world)
    if messages(seed, EncodeVersion)[-1].base_path is not None:
        world.say(seed, EncodeFailed(form, "the base is gone", lacks_base=True))
        world.pending.clear()
        form = form_of(world)
    for _ in range(ENCODE_FAILURES_MAX):
        for peer in world.peers.values():
            world.say(peer, Heartbeat(0))
        world.say(seed, EncodeFailed(form, "frame 3 is lost"))
        world.pass_time(ENCODE_RETRY_S)
    return form


def test_a_version_whose_frames_are_gone_is_given_up_and_the_next_one_spreads() -> None:
    world = serving("a", "b")
    form = fail_for_good(world)
    assert world.stopped is None
    assert world.state.status()["broadcast"] is None
    assert world.state.status()["faults"][-1]["text"] == (
        "version 2 is given up, older ones are served until the next is published: frame 3 is lost"
    )
    assert all(messages(peer, ForgetForm)[-1].form == form for peer in world.peers.values())
    orders = len(messages(world.peers["seed"], EncodeVersion))
    world.connect("seed", kind="seed", slots=0)  # and it is not asked for again
    assert len(messages(world.peers["seed"], EncodeVersion)) == orders
    publish_step(world, 3)
    world.work()
    assert {worker["serving"]["version"] for worker in world.state.status()["workers"]} == {3}


def test_without_a_version_that_the_learner_needs_the_run_stops() -> None:
    world = published("a")
    deliver_seed(world)
    fail_for_good(world)
    assert world.stopped == "version 0 cannot be encoded: frame 3 is lost"


def test_a_version_that_waits_takes_the_place_of_one_that_is_gone() -> None:
    world = published("a")
    deliver_seed(world)
    publish_again(world)
    form = fail_for_good(world)
    assert world.stopped is None
    assert broadcast(world)["form"] != form


def test_a_form_that_comes_out_otherwise_than_it_was_signed_fails() -> None:
    world = published("a")
    deliver_seed(world)
    other = SegmentEncoded(form_of(world), SegmentId(0), Digest(bytes([1]) * 32))
    world.say(world.peers["seed"], other)
    assert not world.peers["seed"].closed
    assert "segment 0 is not the one that was signed" in world.state.status()["faults"][-1]["text"]
    world.pass_time(ENCODE_RETRY_S)
    assert len(messages(world.peers["seed"], EncodeVersion)) == 2


def test_only_the_seed_encodes_and_only_what_was_published() -> None:
    world = published("a")
    world.pending.clear()
    form = form_of(world)
    world.say(world.peers["a"], SegmentEncoded(form, SegmentId(0), Digest(bytes(32))))
    assert world.peers["a"].closed
    world.say(world.peers["seed"], SegmentEncoded(form, SegmentId(0), Digest(bytes(32))))
    world.say(world.peers["seed"], FormEncoded(form, version_digest(9), 1, 1, 1, 0.1))
    assert world.peers["seed"].closed
    assert broadcast(world)["whole"] is False


def test_progress_and_copies_are_counted() -> None:
    world = published("a")
    deliver_seed(world)
    form = form_of(world)
    world.say(world.peers["a"], TransferReport(form, 450, (), 0, duplicates=3))
    world.say(world.peers["seed"], TransferReport(form, 900, (), 1350))
    world.say(world.peers["seed"], TransferReport(FormId("0" * 32), 1, (), 10**9))
    (progress,) = broadcast(world)["peers"]
    assert (progress["payload_bytes"], progress["duplicates"]) == (450, 3)
    assert world.state.status()["seed_copies"] == {"0": 1.5}
    assert (world.state.status()["wire_bytes"], world.state.status()["full_bytes"]) == (900, 1000)


@pytest.mark.parametrize("bytes_min", [0, 1 << 20])
def test_an_uplink_is_what_the_children_of_a_plan_measured(bytes_min: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Known to the next plan, unless the version was too small to tell; what is said of others than a parent is not."""
    monkeypatch.setattr(publishing, "MEASURED_BYTES_MIN", bytes_min)
    world = published("a", "b", kind="star")
    deliver_seed(world)
    seed, stranger = world.peers["seed"].peer, world.peers["b"].peer
    for name, rate in (("a", 3 * MB), ("b", MB)):
        samples = (LinkSample(seed, rate, 1.0), LinkSample(stranger, 10**9, 1.0), LinkSample(seed, 1, math.inf))
        world.say(world.peers[name], TransferReport(form_of(world), 450, samples, 0))
    backlogs = tuple(Backlog(world.peers[name].peer, 1.0) for name in "ab")
    world.say(world.peers["seed"], TransferReport(form_of(world), 900, (), 900, backlogs))
    world.drain()
    publish_again(world)
    world.drain()
    assert [peer.uplink for peer in world.state._members if peer.kind == "seed"] == [None if bytes_min else 4 * MB]
    paces = {edge.pace for edge in messages(world.peers["seed"], PlanEdges)[-1].peers}
    assert paces == {None if bytes_min else PACE * 2 * MB}
    world.crash()
    assert [peer.uplink for peer in world.state._members if peer.kind == "seed"] == [None if bytes_min else 4 * MB]
    assert {worker["uplink"] for worker in world.state.status()["workers"]} == {None}


def report_chain(world: World, rates: dict[str, float]) -> None:
    """Every peer of a chain says that it got so many bytes/s of its parent, who had always more to send."""
    spread = world.state._publishing.spreading
    assert spread is not None
    assert spread.plan is not None
    for parent, child in spread.plan.shares:
        links = (LinkSample(parent, round(rates[parent] * LEARN_S), LEARN_S),)
        world.say(world.peers[child], TransferReport(spread.form, 450, links, 0))
        world.say(world.peers[parent], TransferReport(spread.form, 450, (), 450, (Backlog(PeerId(child), LEARN_S),)))


@pytest.mark.parametrize("slow", [True, False])
def test_a_plan_made_by_guess_is_made_again_when_the_first_bytes_show_that_it_is_bad(
    monkeypatch: pytest.MonkeyPatch, *, slow: bool
) -> None:
    monkeypatch.setattr(publishing, "MEASURED_BYTES_MIN", 0)
    world = published("a", "b", "c")
    deliver_seed(world)
    first = {name: messages(peer, PlanEdges)[-1] for name, peer in world.peers.items()}
    culprit = next(name for name in "abc" if first[name].stripes[0].parent == "seed")
    report_chain(world, {name: 1000.0 if slow and name == culprit else 10.0 * MB for name in world.peers})
    world.drain()
    world.pass_time(LEARN_S)
    told = {name: messages(peer, PlanEdges) for name, peer in world.peers.items()}
    assert {len(parts) for parts in told.values()} == {2 if slow else 1}
    assert (told[culprit][-1].stripes[0].children == ()) == slow
    assert {parts[-1].plan == first["seed"].plan for parts in told.values()} == {not slow}
    report_chain(world, dict.fromkeys(world.peers, 1000.0))
    world.pass_time(LEARN_S)
    assert {len(messages(peer, PlanEdges)) for peer in world.peers.values()} == {2 if slow else 1}


def test_a_plan_by_rates_that_are_known_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "MEASURED_BYTES_MIN", 0)
    world = published("a", "b", "c")
    deliver_seed(world)
    report_chain(world, dict.fromkeys(world.peers, 10.0 * MB))
    world.drain()
    world.pass_time(LEARN_S)
    publish_again(world)
    deliver_seed(world)
    report_chain(world, dict.fromkeys(world.peers, 1000.0))
    told = sum(len(messages(peer, PlanEdges)) for peer in world.peers.values())
    world.pass_time(LEARN_S)
    assert sum(len(messages(peer, PlanEdges)) for peer in world.peers.values()) == told


def test_revoked_versions_stop_spreading() -> None:
    world = published("a")
    world.drain()
    world.open_session()
    world.publish(0, salt=1)  # other bytes under the same number
    assert broadcast(world)["whole"] is False
    world = World()
    world.connect("seed", kind="seed", slots=0)
    world.connect("a")
    train(world, 3)
    world.open_session(2)
    world.publish(2)
    digest = world.replies[world.ask_batch(3)].digest
    assert digest is not None
    world.commit(3, digest)
    world.publish(3, salt=1)
    assert (broadcast(world)["version"], broadcast(world)["waiting_version"]) == (2, 3)
    world.open_session(2)
    assert (broadcast(world)["version"], broadcast(world)["waiting_version"]) == (2, None)
    world.open_session(1)
    assert world.state.status()["broadcast"] is None
    world.publish(1)
    assert broadcast(world)["version"] == 1


def test_verifying_what_was_never_published_is_a_fault() -> None:
    world = published("a")
    world.say(world.peers["a"], VersionVerified(form_of(world), Version(7), version_digest(7)))
    assert "not published" in world.state.status()["faults"][-1]["text"]


@pytest.mark.parametrize("workers", [(), ("a",)])
def test_snapshot_copies_go_when_something_newer_spreads(workers: tuple[str, ...]) -> None:
    world = published(*workers)
    world.drain()
    publish_again(world)
    assert DeleteVersion("versions/1-0") in world.actions


def test_after_a_revocation_and_a_restart_nothing_spreads_before_the_next_publish() -> None:
    world = World(rules(shape="chain"))
    world.connect("seed", kind="seed", slots=0)
    world.connect("a")
    train(world, 1)
    world.drain()
    world.open_session()
    orders = len(messages(world.peers["seed"], EncodeVersion))
    world.crash()
    world.drain()
    assert len(messages(world.peers["seed"], EncodeVersion)) == orders
    assert world.state.status()["broadcast"] is None
    world.publish(0)
    world.drain()
    assert messages(world.peers["seed"], EncodeVersion)[-1].version == 0
