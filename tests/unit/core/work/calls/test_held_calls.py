"""Calls that one version alone may write, in a run whose workers hold several versions."""

import pytest

from echo2d.core.base.ids import Version
from echo2d.core.cluster.events import PeerDisconnected
from echo2d.core.cluster.membership import HEARTBEATS_MISSED_MAX
from echo2d.core.coordinator.events import CoordinatorAction
from echo2d.core.protocol.control_messages import (
    Goodbye,
    Heartbeat,
    LeaseFailed,
    RefitFailed,
)
from echo2d.core.protocol.trajectory import pack_tokens
from echo2d.core.work.calls.calls import CALL_FAILURES_MAX
from echo2d.core.work.calls.events import CallRefused, ChoiceGrew
from echo2d_lab.standins.memory_run import FakePeer
from tests.support.coordinator_world import World, version_key
from tests.support.gateway import (
    WAIT_S,
    call,
    exactly,
    gateway_world,
    held_world,
    hold,
    key_of,
    of_calls,
    publish,
)
from tests.support.rollouts import SILENCE_S


def refused(actions: list[CoordinatorAction]) -> list[str]:
    return [each.code for each in actions if isinstance(each, CallRefused)]


def named(peer: FakePeer) -> list[int | None]:
    """The versions that the peer's leases name."""
    return [lease.version and lease.version.version for lease in of_calls(peer)]


def three_versions(*slots: int) -> tuple[World, list[FakePeer]]:
    """All workers hold versions 0, 1 and 2, and serve the last."""
    world, workers = held_world(*slots)
    for version in (1, 2):
        hold(world, *range(version))
        publish(world, version, *workers)
    return world, workers


def test_any_held_version_is_drawn_from_at_the_same_time() -> None:
    world, (worker,) = three_versions(4)
    for version in range(3):
        world.handle(exactly(version, version))
    assert named(worker) == [0, 1, 2]
    for version, lease in enumerate(of_calls(worker)):
        assert lease.version == version_key(version)
        assert lease.oldest == version
        actions = world.say(worker, worker.finish(key_of(lease), 0, tokens=(7, 1)))
        [grown] = [each for each in actions if isinstance(each, ChoiceGrew)]
        assert [span.key for span in grown.spans] == [version_key(version)]
        assert grown.finish == "stop"


def test_calls_of_other_versions_and_of_other_runs_name_no_version() -> None:
    world, (worker,) = three_versions(4)
    world.handle(call(1))
    world.handle(call(2, max_version=Version(2)))
    assert named(worker) == [None, None]
    world, (worker,) = gateway_world(2)
    world.handle(exactly(1, 0))
    assert named(worker) == [None]


def test_the_fastest_holder_writes_whatever_it_serves() -> None:
    world, (one, two) = held_world(2, 8)
    hold(world, 0)
    publish(world, 1, two)
    world.handle(exactly(1, 0))
    assert (named(one), named(two)) == ([], [0])  # it has more free slots
    world.handle(exactly(2, 1, choices=8))
    assert named(two) == [0, 1]
    assert named(one) == []


def test_a_lease_of_a_held_version_goes_on_while_others_are_loaded() -> None:
    world, (worker,) = three_versions(4)
    world.handle(exactly(1, 0))
    [lease] = of_calls(worker)
    world.say(worker, worker.wrote(key_of(lease), 0, 7))
    hold(world, 1, 2)
    publish(world, 3, worker)
    for tokens in ((8,), (9,)):
        actions = world.say(
            worker, worker.wrote(key_of(lease), 0, *tokens, start=6 + tokens[0] - 13)
        )
        assert [type(each) for each in actions] == [ChoiceGrew]
    # But no new one is begun, and a choice that loses its worker cannot go on.
    assert refused(world.handle(exactly(2, 0))) == ["version"]
    assert refused(world.say(worker, LeaseFailed(*key_of(lease), "no memory"))) == ["version"]


def test_another_worker_that_holds_the_version_goes_on_from_the_tokens() -> None:
    world, peers = three_versions(2, 2)
    world.handle(exactly(1, 1))
    first, second = sorted(peers, key=lambda peer: not of_calls(peer))
    world.say(first, first.wrote(key_of(of_calls(first)[0]), 0, 7, 8))
    world.say(first, Goodbye("SIGTERM"))
    [lease] = of_calls(second)
    assert (lease.version, lease.written) == (version_key(1), 2)
    assert lease.prompt == pack_tokens([5, 6, 7, 8])
    actions = world.say(second, second.finish(key_of(lease), 0, tokens=(9, 1)))
    assert [each.finish for each in actions if isinstance(each, ChoiceGrew)] == ["stop"]


def test_a_worker_that_joins_later_gets_only_the_newest() -> None:
    world, (old,) = three_versions(1)
    late = world.connect("late", slots=8)
    world.drain()
    world.refit(late)
    for number, version in enumerate((2, 2, 1, 0)):
        world.handle(exactly(number, version))
    assert (named(old), named(late)) == ([1], [2, 2])
    assert world.state.status().gateway.waiting == 1


def test_a_version_that_no_worker_holds_is_refused_unless_it_is_on_its_way() -> None:
    world, (worker,) = held_world(1)
    world.handle(exactly(1, 0))
    hold(world, 0)
    world.publish(1)
    world.handle(exactly(2, 1))
    world.publish(2)
    # Version 1 spreads, and version 2 waits until it has spread.
    world.handle(exactly(3, 1))
    world.handle(exactly(4, 2))
    assert world.state.status().gateway.waiting == 3
    assert refused(world.handle(exactly(5, 3))) == ["version"]
    # The worker has received both before it loads one of them.
    world.drain()
    world.refit(worker)
    assert world.state.status().gateway.ended == {"version": 3}


def test_waiting_calls_end_when_the_last_holder_drops_their_version() -> None:
    world, (worker,) = three_versions(1)
    for number, version in enumerate((2, 1, 0)):
        world.handle(exactly(number, version))
    assert named(worker) == [2]
    hold(world, 0)
    publish(world, 3)
    worker.ready = version_key(3)
    assert world.refit(worker)
    assert world.state.status().gateway.ended == {"version": 1}  # that of version 1
    lost = RefitFailed(*version_key(3), None, "out of memory")
    assert refused(world.say(worker, lost)) == ["version"]


def test_a_broken_connection_ends_no_call_but_a_silence_does() -> None:
    world, (worker,) = three_versions(1)
    world.handle(exactly(1, 2))
    world.handle(exactly(2, 0))
    world.handle(PeerDisconnected(worker.session, "reset"))
    world.handle(exactly(3, 0))
    assert world.state.status().gateway.ended == {}
    world.connect(worker.name)
    assert world.state.status().gateway.waiting == 2
    world.handle(PeerDisconnected(worker.session, "reset"))
    world.pass_time(HEARTBEATS_MISSED_MAX * world.rules.heartbeat_s + 0.1)
    assert world.state.status().gateway.ended == {"version": 2}
    world.pass_time(SILENCE_S)
    assert world.state.status().gateway.waiting == 1  # of the newest version


def test_a_restarted_worker_holds_less() -> None:
    world, (worker,) = three_versions(1)
    world.handle(exactly(1, 0))
    world.handle(exactly(2, 1))
    worker.beside = (version_key(0),)
    worker.leases.clear()
    worker.open.clear()
    world.connect(worker.name, boot_id="again")
    assert world.state.status().gateway.ended == {"version": 1}
    assert world.state.status().gateway.waiting == 1


def test_a_call_that_names_a_revoked_version_ends_although_its_number_comes_again() -> None:
    world, (worker,) = three_versions(1)
    world.handle(exactly(1, 1))
    world.handle(exactly(2, 1))
    world.open_session()
    world.publish(1, salt=1)
    assert refused(world.actions) == ["revoked", "revoked"]
    world.handle(exactly(3, 1))
    assert world.state.status().gateway.waiting == 1
    world.drain()
    world.refit(worker)
    assert of_calls(worker)[-1].version == version_key(1, 1)


def test_a_worker_that_cannot_write_a_version_after_all_does_not_get_the_call_for_ever() -> None:
    world, (worker,) = three_versions(1)
    world.handle(exactly(1, 0))
    for _ in range(CALL_FAILURES_MAX):
        world.say(worker, LeaseFailed(*key_of(of_calls(worker)[-1]), "it does not hold version 0"))
        worker.leases.clear()
        world.pass_time(2.0)
        world.say(worker, Heartbeat(0))
    assert world.state.status().gateway.ended == {"failed": 1}


def test_a_call_that_has_waited_too_long_says_that_no_slot_was_free() -> None:
    world, (worker,) = three_versions(1)
    world.handle(exactly(1, 2))
    world.handle(exactly(2, 0))
    codes: list[str] = []
    for _ in range(int(WAIT_S / 2) + 1):
        world.pass_time(2.0)
        codes += refused(world.actions)
        world.say(worker, worker.wrote(key_of(of_calls(worker)[0]), 0))
    assert codes == ["late"]


@pytest.mark.parametrize("slow", [False, True])
def test_the_session_goes_to_its_usual_worker_while_that_holds_the_version(slow: bool) -> None:
    world, (one, two) = held_world(4, 4)
    hold(world, 0)
    publish(world, 1, one, two)
    world.handle(exactly(1, 0, session="x"))
    usual, other = sorted((one, two), key=lambda peer: not of_calls(peer))
    if slow:
        usual.beside = ()
        world.connect(usual.name, boot_id="again")
    world.handle(exactly(2, 0, session="x"))
    assert (len(of_calls(usual)), len(of_calls(other))) == ((1, 1) if slow else (2, 0))
