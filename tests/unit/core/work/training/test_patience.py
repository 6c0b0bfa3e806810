"""Groups that are trained without samples that took too long; each through the whole machine."""

import pytest

from echo2d.core.base.ids import GroupId
from echo2d.core.protocol.control_messages import Heartbeat, LeaseCancelled
from echo2d.core.protocol.trajectory import unpack_batch
from echo2d.core.rules.tasks import TaskRules
from echo2d_lab.standins.memory_run import FakePeer
from tests.support.coordinator_world import World, messages
from tests.support.rollouts import answers, grants, world_of

TOOK_S = 10.0  # the other answers of the group
PATIENCE = 3.0
TOKEN_S = 3.0
TASKS = (TaskRules(max_new_tokens=64, stop_token_ids=(1,)),)


def three_of_four(**changes: object) -> tuple[World, FakePeer, FakePeer]:
    """A group of four, of which one worker has written three, and the other one has not ended the last."""
    rules = {
        "group_size": 4,
        "group_min": 2,
        "trajectories_per_step": 4,
        "staleness_max": 0,
        "tasks": TASKS,
    }
    world, (one, two) = world_of(3, 1, **{**rules, "group_patience": PATIENCE, **changes})
    wait(world, TOOK_S)
    end_all(world, one)
    return world, one, two


def end_all(world: World, peer: FakePeer) -> None:
    for key, sample in list(peer.open):
        world.say(peer, peer.finish(key, sample))
    world.drain()


def wait(world: World, seconds: float) -> None:
    """The time passes, and everybody is heard and writes on."""
    for _ in range(int(seconds)):
        world.pass_time(1.0)
        tokens = [3] * int(world.now / TOKEN_S)
        for peer in world.peers.values():
            world.say(peer, Heartbeat(0))
            for key, sample in peer.open:
                world.say(peer, peer.wrote(key, sample, *tokens))


def test_a_group_goes_on_without_the_sample_that_it_waited_for_too_long() -> None:
    world, one, two = three_of_four()
    (late,) = grants(two)
    wait(world, (PATIENCE - 1.0) * TOOK_S - 1.0)
    assert not messages(two, LeaseCancelled)
    result = two.finish(*two.open[0])
    wait(world, 2.0)
    assert messages(two, LeaseCancelled) == [LeaseCancelled(late.lease, late.attempt)]
    assert world.ledger.groups[GroupId(0)].record.left_out == late.samples
    world.say(two, result)
    assert answers(two)[-1] == (False, "the lease is over")
    world.crash()
    world.open_session()
    request = world.ask_batch(1)
    body = world.replies[request].body
    assert isinstance(body, bytes)
    (group,) = unpack_batch(body).groups
    assert [each.sample for each in group.trajectories] == list(grants(one)[0].samples)


def test_a_group_goes_on_without_its_late_sample_before_it_is_too_old() -> None:
    world, one, two = three_of_four(group_patience=1000.0, staleness_max=1)
    (late,) = grants(two)
    for _ in range(2):
        end_all(world, one)  # the group of step 1, instead
    digest = world.replies[world.ask_batch(1)].digest
    assert digest is not None
    world.commit(1, digest)
    world.publish(1)
    world.drain()
    world.refit(one)
    for _ in range(2):
        end_all(world, one)  # the one of step 3
    assert world.state.status().groups.buffered == 1
    assert not messages(two, LeaseCancelled)
    body = world.replies[world.ask_batch(2)].body
    assert messages(two, LeaseCancelled) == [LeaseCancelled(late.lease, late.attempt)]
    assert isinstance(body, bytes)
    assert [group.left_out for group in unpack_batch(body).groups] == [late.samples]
    assert world.state.status().groups.buffered == 1


@pytest.mark.parametrize("changes", [{"group_patience": 0.0}, {"group_min": 4}])
def test_a_group_waits_for_its_late_sample(changes: dict[str, float]) -> None:
    """The operator says so, or three samples are too few."""
    world, _, two = three_of_four(**changes)
    wait(world, 2 * PATIENCE * TOOK_S)
    assert not messages(two, LeaseCancelled)
    end_all(world, two)
    assert world.ledger.groups[GroupId(0)].record.left_out == ()
    assert world.state.status().groups.buffered == 1


def test_a_group_of_four_does_not_go_on_without_two_samples() -> None:
    world, (one, two) = world_of(
        2, 2, group_size=4, group_min=2, trajectories_per_step=4, staleness_max=0, group_patience=PATIENCE, tasks=TASKS
    )  # fmt: skip
    wait(world, TOOK_S)
    end_all(world, one)
    wait(world, 2 * PATIENCE * TOOK_S)
    assert not messages(two, LeaseCancelled)


def test_a_group_without_a_late_sample_keeps_its_rewards_over_a_restart() -> None:
    """The coordinator dies before the others are scored: they are scored anew, and the sample stays left out."""
    world, one, two = three_of_four(staleness_max=0, filter_zero_variance=False)
    wait(world, PATIENCE * TOOK_S)
    world.crash()
    world.drain()
    assert world.state.status().groups.buffered == 1
    assert not one.open
    assert not two.open
