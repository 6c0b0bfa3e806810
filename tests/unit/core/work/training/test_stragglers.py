"""Samples for which their group waits move to faster workers; each through the whole machine, as workers see it."""

import pytest

from echo2d.core.protocol.control_messages import LeaseCancelled
from echo2d.core.protocol.trajectory import unpack_tokens
from echo2d.core.work.training.stragglers import JUDGED_S_MIN, MOVES_MAX
from echo2d_lab.standins.memory_run import FakePeer
from tests.support.coordinator_world import World, messages
from tests.support.rollouts import grants, world_of

SLOW, FAST = 0.01, 0.1  # answers/s of one slot


def two_speeds(
    slow: float = SLOW, fast: float = FAST, **changes: object
) -> tuple[World, FakePeer, FakePeer]:
    """Two workers of one slot, of which each writes one of the two samples of the second group; the first one told
    how long answers are.
    """
    world, (one, two) = world_of(1, 1, **{"trajectories_per_step": 8, **changes})
    measurements = world.state._statistics.measurements
    measurements.settle(60.0, {one.peer: slow, two.peer: fast}, now=world.now)
    for peer in (one, two):
        world.say(peer, peer.finish(*peer.open[0]))
    world.drain()
    world.pass_time(2 * JUDGED_S_MIN)
    return world, one, two


def tell(world: World, peer: FakePeer, *tokens: int) -> None:
    world.say(peer, peer.wrote(next(iter(peer.leases)), peer.open[0][1], *tokens))


def end(world: World, peer: FakePeer) -> None:
    world.say(peer, peer.finish(*peer.open[0]))


def test_the_last_sample_of_a_group_continues_at_a_faster_worker() -> None:
    world, one, two = two_speeds()
    waited_for = grants(one)[-1]
    tell(world, one, 7, 8)
    end(world, two)
    moved = grants(two)[-1]
    assert (moved.group, moved.lease, moved.attempt) == (waited_for.group, waited_for.lease, 1)
    assert moved.prompt == waited_for.prompt + moved.prompt[-8:]
    assert [int(token) for token in unpack_tokens(moved.prompt[-8:])] == [7, 8]
    assert messages(one, LeaseCancelled)[-1] == LeaseCancelled(waited_for.lease, 0)
    # The slot that it left is not idle.
    assert grants(one)[-1].group > waited_for.group
    end(world, two)
    assert world.state.status().handed_over.tokens == 2


def test_a_straggler_moves_to_another_worker_although_nothing_else_happens() -> None:
    """The faster worker has had a free slot for long, and the gates let no group begin."""
    world, one, two = two_speeds(trajectories_per_step=4, staleness_max=0)
    waited_for = grants(one)[-1]
    end(world, two)
    assert grants(two)[-1].group == waited_for.group
    assert not two.leases
    tell(world, one, 7, 8)
    wakes_at = world.state._groups.wake_at()
    assert wakes_at is not None
    assert wakes_at <= world.now + JUDGED_S_MIN
    world.pass_time(2 * JUDGED_S_MIN)
    assert grants(two)[-1].lease == waited_for.lease
    assert messages(one, LeaseCancelled)


@pytest.mark.parametrize(
    "changes",
    [
        {"move_stragglers": False},
        {"fast": 1.6 * SLOW},
        {"slow": FAST, "fast": SLOW},
    ],
)
def test_a_straggler_stays_at_its_worker_if_a_move_gains_nothing(changes: dict[str, float]) -> None:
    """The operator forbids it, the other worker may look faster by chance, or is slower."""
    world, one, two = two_speeds(**changes)
    before = len(grants(one))
    tell(world, one, 7, 8)
    end(world, two)
    assert not messages(one, LeaseCancelled)
    assert len(grants(one)) == before


def test_a_straggler_stays_while_its_worker_has_reported_nothing() -> None:
    world, one, two = two_speeds()
    end(world, two)
    assert not messages(one, LeaseCancelled)


def test_the_number_of_moves_of_a_sample_is_limited() -> None:
    world, one, two = two_speeds()
    groups = world.state._groups
    (group,) = [each for each in groups._groups if each.group == grants(one)[-1].group]
    group.moves[grants(one)[-1].samples[0]] = MOVES_MAX
    tell(world, one, 7, 8)
    end(world, two)
    assert not messages(one, LeaseCancelled)


def test_tokens_that_a_worker_wrote_of_a_moved_sample_count_for_it() -> None:
    world, one, two = two_speeds()
    tell(world, one, 7, 8)
    end(world, two)
    work = world.state._statistics.measurements._work
    before = work[one.peer].accepted
    end(world, two)  # three tokens more
    assert work[one.peer].accepted - before == pytest.approx(2 / 5)
