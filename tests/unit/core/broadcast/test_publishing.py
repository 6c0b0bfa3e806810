"""The version that spreads, and the messages about it; through the whole machine."""

import pytest

from echo2d.core.base.ids import FormId, Version
from echo2d.core.broadcast.events import SendRoot
from echo2d.core.cluster.events import DeleteVersion
from echo2d.core.protocol.control_messages import (
    ApplyFailed,
    EncodeVersion,
    ForgetForm,
    Heartbeat,
    PlanEdges,
    TransferReport,
    VersionVerified,
)
from tests.support.coordinator_world import World, form_of, messages, rules, train, version_digest
from tests.support.publishing import broadcast, deliver_seed, publish_again, published


def test_one_version_spreads_and_the_newest_waits() -> None:
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
    assert (broadcast(world).version, broadcast(world).waiting_version) == (3, 5)
    old = form_of(world)
    world.drain()
    assert broadcast(world).version == 5
    versions = [order.version for order in messages(world.peers["seed"], EncodeVersion)]
    assert versions[-4:] == [1, 2, 3, 5]
    assert messages(world.peers["seed"], ForgetForm)[-1].form == old


def test_a_worker_that_cannot_apply_gets_its_plan_again_after_growing_pauses() -> None:
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


def test_progress_and_copies_are_counted() -> None:
    world = published("a", seed_usd_per_gb_up=2.0)
    deliver_seed(world)
    form = form_of(world)
    world.say(world.peers["a"], TransferReport(form, 450, (), 0, duplicates=3))
    world.say(world.peers["seed"], TransferReport(form, 900, (), 1350))
    world.say(world.peers["seed"], TransferReport(FormId("0" * 32), 1, (), 10**9))
    (progress,) = broadcast(world).peers
    assert (progress.payload_bytes, progress.duplicates) == (450, 3)
    status = world.state.status()
    assert status.seed_copies == {0: 1.5}
    assert status.seed_usd == {0: pytest.approx(1350 * 2e-9)}
    assert status.seed_sent_bytes == 1350
    assert status.seed_usd_total == pytest.approx(1350 * 2e-9)
    assert (world.state.status().wire_bytes, world.state.status().full_bytes) == (900, 1000)


def test_revoked_versions_stop_spreading() -> None:
    world = published("a")
    world.drain()
    world.open_session()
    world.publish(0, salt=1)  # other bytes under the same number
    assert broadcast(world).whole is False
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
    assert (broadcast(world).version, broadcast(world).waiting_version) == (2, 3)
    world.open_session(2)
    assert (broadcast(world).version, broadcast(world).waiting_version) == (2, None)
    world.open_session(1)
    assert world.state.status().broadcast is None
    world.publish(1)
    assert broadcast(world).version == 1


def test_a_report_about_a_version_that_was_never_published_is_a_fault() -> None:
    world = published("a")
    world.say(world.peers["a"], VersionVerified(form_of(world), Version(7), version_digest(7)))
    assert "not published" in world.state.status().faults[-1].text


@pytest.mark.parametrize("workers", [(), ("a",)])
def test_snapshot_copies_are_deleted_when_a_newer_version_spreads(workers: tuple[str, ...]) -> None:
    world = published(*workers)
    world.drain()
    publish_again(world)
    assert DeleteVersion("versions/1-0") in world.actions


def test_no_version_spreads_after_a_revocation_and_a_restart_before_the_next_publish() -> None:
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
    assert world.state.status().broadcast is None
    world.publish(0)
    world.drain()
    assert messages(world.peers["seed"], EncodeVersion)[-1].version == 0
