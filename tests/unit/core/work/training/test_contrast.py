"""Groups whose rewards are all the same: how many of them a step drops."""

import pytest

from echo2d.core.base.ids import GroupId, PeerId, Version
from echo2d.core.protocol.trajectory import (
    AuthoredSpan,
    GroupRecord,
    TrajectoryRecord,
    pack_tokens,
)
from echo2d.core.work.training.contrast import EXTRA_STEPS_MAX, VarianceFilter
from tests.support.coordinator_world import rules, version_digest
from tests.support.rollouts import world_of


def group_of(*rewards: float) -> GroupRecord:
    span = AuthoredSpan(0, 1, Version(0), version_digest(0), PeerId("w"))
    return GroupRecord(
        GroupId(0),
        pack_tokens([1]),
        tuple(
            TrajectoryRecord(sample, pack_tokens([2]), bytes(4), (span,), "stop", reward)
            for sample, reward in enumerate(rewards)
        ),
    )


@pytest.mark.parametrize(
    ("rewards", "concerned"),
    [((1.0, 1.0), True), ((0.0, 0.0, 0.0), True), ((1.0, 0.0), False), ((1.0,), True)],
)
def test_equal_rewards_are_recognised(rewards: tuple[float, ...], concerned: bool) -> None:
    assert VarianceFilter(rules()).concerns(group_of(*rewards)) is concerned
    assert not VarianceFilter(rules(filter_zero_variance=False)).concerns(group_of(*rewards))


def test_groups_of_one_sample_are_not_filtered() -> None:
    assert not VarianceFilter(rules(group_size=1)).concerns(group_of(1.0))


def test_each_step_filters_a_limited_number_of_groups() -> None:
    variance_filter = VarianceFilter(rules(group_size=2, trajectories_per_step=4))
    for step in (1, 2):
        variance_filter.opened(step)
        filtered = [variance_filter.filter() for _ in range(2 * EXTRA_STEPS_MAX + 1)]
        assert filtered == [*[True] * 2 * EXTRA_STEPS_MAX, False]
        variance_filter.opened(step)
        assert not variance_filter.filter()


def test_the_share_of_groups_without_variance_is_measured() -> None:
    world, _ = world_of(2, staleness_max=0)
    world.reward = lambda cursor, sample: 1.0
    request = world.ask_batch(1)
    world.work()
    assert request in world.replies
    status = world.state.status()
    assert status.groups_dropped == {"filtered": 8}  # 4 R = 16 trajectories
    assert status.trajectories.dropped == 16
    kept = {
        each.length
        for stored in world.ledger.groups.values()
        for each in stored.record.trajectories
    }
    assert [status.answer_tokens] == [
        {"filtered": length} for length in kept
    ]  # all are as long as each other
