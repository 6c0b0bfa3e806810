"""What workers are told to hold, and what the coordinator believes that they hold."""

from echo2d.core.base.ids import Version
from echo2d.core.cluster.events import PeerDisconnected
from echo2d.core.cluster.membership import HEARTBEATS_MISSED_MAX
from echo2d.core.protocol.control_messages import (
    Goodbye,
    HeldVersions,
    RefitDone,
    RefitFailed,
    VersionKey,
    VersionsRevoked,
    Welcome,
)
from echo2d_lab.standins.memory_run import FakePeer
from tests.support.coordinator_world import World, messages, version_key
from tests.support.gateway import gateway_world, held_world, hold, publish


def held(world: World, peer: FakePeer) -> set[int]:
    """The versions that the coordinator believes that this worker holds."""
    known = world.state._members.get(peer.peer)
    assert known is not None
    return {key.version for key in known.engine.held}


def keys(*versions: int) -> tuple[VersionKey, ...]:
    return tuple(map(version_key, versions))


def test_workers_are_told_after_their_welcome_and_whenever_it_changes() -> None:
    world, (one, two) = held_world(2, 2)
    assert [type(each) for each in one.inbox[:2]] == [Welcome, HeldVersions]
    assert messages(one, HeldVersions) == [HeldVersions(3, ())]
    publish(world, 1, one, two)
    assert len(hold(world, 0, 1, 7)) == 2
    assert hold(world, 0, 1) == []
    for worker in (one, two):
        assert messages(worker, HeldVersions)[-1] == HeldVersions(3, keys(0, 1))
    late = world.connect("late", slots=1)
    assert messages(late, HeldVersions) == [HeldVersions(3, keys(0, 1))]
    assert not messages(world.peers["seed"], HeldVersions)


def test_a_worker_that_is_silent_for_a_moment_is_told_too() -> None:
    world, (worker,) = held_world(2)
    world.pass_time(HEARTBEATS_MISSED_MAX * world.rules.heartbeat_s)
    assert len(hold(world, 0)) == 1
    assert messages(worker, HeldVersions)[-1] == HeldVersions(3, keys(0))


def test_engines_hold_what_they_are_told_before_the_next_version() -> None:
    world, (one, two) = held_world(2, 2)
    hold(world, 0)
    publish(world, 1, one, two)
    assert held(world, one) == held(world, two) == {0, 1}
    hold(world, 1, 0)
    publish(world, 2, one)
    assert (held(world, one), held(world, two)) == ({0, 1, 2}, {0, 1})
    hold(world, 2)
    publish(world, 3, one, two)
    assert (held(world, one), held(world, two)) == ({2, 3}, {3})


def test_a_run_whose_engines_hold_one_version_is_told_nothing() -> None:
    world, (worker,) = gateway_world(2)
    assert messages(worker, HeldVersions) == []
    key = version_key(0)
    world.say(worker, RefitDone(*key, 0.1, memory_ok=True, held=(key, version_key(1))))
    assert held(world, worker) == {0}


def test_a_worker_holds_only_what_it_has_served_and_what_is_live() -> None:
    world, (worker,) = held_world(2)
    publish(world, 1, worker)
    publish(world, 2)
    lies = (*keys(1, 0, 2, 9), *keys(5, 6, 7))
    world.say(worker, RefitDone(*version_key(1), 0.1, memory_ok=True, held=lies))
    assert held(world, worker) == {0, 1}
    world.say(worker, RefitFailed(*version_key(2), version_key(1), "no memory", keys(1, 0)))
    assert held(world, worker) == {0, 1}
    world.say(worker, RefitFailed(*version_key(2), None, "no memory", keys(1, 0)))
    assert held(world, worker) == set()


def test_what_a_worker_holds_is_known_again_when_it_comes_back() -> None:
    world, (worker,) = held_world(2)
    hold(world, 0)
    publish(world, 1, worker)
    world.handle(PeerDisconnected(worker.session, "reset"))
    world.open_session()
    world.publish(0, salt=1)
    worker.beside = keys(0)
    world.connect(worker.name)
    assert held(world, worker) == {1}
    told = messages(worker, VersionsRevoked)[-1]
    assert told.versions == keys(0)
    world.say(worker, Goodbye("bye"))
    assert held(world, worker) == set()


def test_a_revoked_version_is_held_no_more_also_when_it_is_published_again() -> None:
    world, (worker,) = held_world(2)
    hold(world, 0)
    publish(world, 1, worker)
    world.open_session()
    world.publish(0, salt=1)
    assert held(world, worker) == {1}
    assert messages(worker, HeldVersions)[-1].versions == keys(0)
    world.open_session()
    world.publish(0)
    assert held(world, worker) == {1}
    world.state.check()


def test_a_version_has_spread_when_every_worker_at_work_holds_it() -> None:
    world, (one, two) = held_world(2, 2)
    hold(world, 0)
    publish(world, 1, one)
    spread = world.state._parts.holding.spread
    assert (spread(Version(0)), spread(Version(1))) == (True, False)
    world.connect("late", slots=1)
    world.refit(two)
    assert spread(Version(1)), "the late one serves nothing yet"
    publish(world, 2, one, two, world.peers["late"])
    assert (spread(Version(0)), spread(Version(2))) == (False, True)
    assert spread(Version(9)), "there is no such version"


def test_a_version_arrives_with_its_first_worker_and_is_possible_before() -> None:
    world, (one, _two) = held_world(2, 2)
    hold(world, 0)
    holding = world.state._parts.holding
    publish(world, 1)
    version = Version(1)
    assert (holding.arrived(version), holding.possible(version)) == (False, True)
    world.refit(one)
    assert holding.arrived(version)
    # An older one that no worker holds will come to none.
    publish(world, 2, *world.peers.values())
    publish(world, 3, *world.peers.values())
    assert not holding.possible(version)
    assert not holding.possible(Version(9))


def test_the_room_is_what_most_workers_say_that_they_have() -> None:
    world, workers = held_world(2, 2, 2)
    holding = world.state._parts.holding
    engines = [world.state._members.get(each.peer) for each in workers]
    for peer, most in zip(engines, (1, 1, None), strict=True):
        assert peer is not None
        peer.engine.held_max = most
    assert holding.room == 1
    assert engines[0] is not None
    engines[0].engine.held_max = None
    assert holding.room == 3
