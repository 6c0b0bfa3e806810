"""The end of a broadcast: the workers that it waits for, and for how long; through the whole machine."""

from echo2d.core.base.ids import FrameId, PeerId, Version
from echo2d.core.broadcast.spread_end import FIXED_S
from echo2d.core.protocol.control_messages import ApplyFailed, FrameAccused, VersionVerified
from tests.support.coordinator_world import form_of, version_digest
from tests.support.publishing import broadcast, deliver_seed, publish_again, published


def test_slow_workers_do_not_hold_up_the_next_version() -> None:
    world = published("a", "b")
    deliver_seed(world)
    key = world.peers["a"].ready
    assert key is not None
    old = publish_again(world)
    world.pass_time(FIXED_S + 1.0)
    assert broadcast(world).form == old  # nobody has it
    world.say(world.peers["a"], VersionVerified(old, key.version, key.digest))
    assert broadcast(world).form != old


def test_a_broadcast_does_not_wait_for_a_worker_that_cannot_apply() -> None:
    world = published("a", "b")
    deliver_seed(world)
    key = world.peers["a"].ready
    assert key is not None
    old = publish_again(world)
    world.say(world.peers["a"], VersionVerified(old, key.version, key.digest))
    world.say(world.peers["b"], ApplyFailed(old, "disk full"))
    assert broadcast(world).form != old
    assert "disk full" in world.state.status().faults[-1].text


def test_a_version_does_not_wait_for_a_quarantined_worker() -> None:
    world = published("a", "b")
    deliver_seed(world)
    transmission = world.state._publishing.spreading
    assert transmission is not None
    (first,) = transmission.neighbours(PeerId("seed"))
    (other,) = {"a", "b"} - {first}
    world.say(world.peers["seed"], FrameAccused(form_of(world), FrameId(1), first))
    world.say(world.peers[other], VersionVerified(form_of(world), Version(0), version_digest(0)))
    assert not world.state._publishing._spread_end.awaits_anyone(transmission)
    assert len(world.state.status().t_verify_s) == 1
