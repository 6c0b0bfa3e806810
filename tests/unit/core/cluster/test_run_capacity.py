"""The time that a version may spread, from a run's measurements, if the seed's bytes cost money."""

from typing import Any

import pytest

from echo2d.core.capacity.demand import SLACK_SHARE
from echo2d.core.capacity.measurements import LATE_MAX
from echo2d.core.cluster.run_capacity import spread_s
from echo2d.core.cluster.statistics import Statistics
from echo2d.core.rules.run import RunRules
from tests.support.coordinator_world import rules


def priced(**changes: Any) -> RunRules:
    return rules(staleness_max=4, publish_every=3, seed_usd_per_gb_up=0.09, **changes)


def measured(t_bcast_s: float = 20.0) -> Statistics:
    """T_train is 100 s, a trajectory takes 30 s, a refit 5 s: (S + 1 - kappa) T - g - (T - P / 3) = 71.7 s."""
    statistics = Statistics()
    statistics.measurements.t_train.add(100.0)
    statistics.measurements.t_bcast.add(t_bcast_s)
    statistics.measurements.t_gen.add(30.0)
    statistics.measurements.lengths.newest = (1.0,)
    statistics.measurements.pause.add(5.0)
    return statistics


SLACK_S = 200 - 30 - (100 - 5 / 3)


def test_a_version_may_take_half_of_the_slack_less_the_refit() -> None:
    assert spread_s(priced(), measured(), 0.0) == pytest.approx(SLACK_SHARE * SLACK_S - 5)
    assert spread_s(priced(), measured(), 10.0) == pytest.approx(SLACK_SHARE * SLACK_S - 15)
    auto = rules(staleness_max=4, publish_every="auto", seed_usd_per_gb_up=0.09)
    assert spread_s(auto, measured(), 0.0) == pytest.approx(SLACK_SHARE * 100 - 5), "kappa is 1"


def test_the_time_is_not_limited_if_bytes_cost_nothing() -> None:
    assert spread_s(rules(staleness_max=4, publish_every=3), measured(), 0.0) is None


@pytest.mark.parametrize("lacks", ["t_train", "t_bcast", "t_gen"])
def test_a_missing_measurement_leaves_no_time(lacks: str) -> None:
    statistics, empty = measured(), Statistics()
    setattr(statistics.measurements, lacks, getattr(empty.measurements, lacks))
    assert spread_s(priced(), statistics, 0.0) == 0


def test_no_time_is_left_if_workers_stop_or_batches_are_needed_at_once() -> None:
    assert spread_s(priced(mode="exclusive"), measured(), 0.0) == 0
    hasty = rules(staleness_max=4, publish_every=4, seed_usd_per_gb_up=0.09)
    assert spread_s(hasty, measured(), 0.0) == 0
    assert spread_s(priced(), measured(), SLACK_S) == 0, "it has waited for too long"


def test_versions_that_came_late_leave_less_time_to_the_next_ones() -> None:
    statistics = measured()
    statistics.broadcast(22.0, (), cold=False, expected_s=10.0)
    statistics.broadcast(50.0, (), cold=True, expected_s=10.0)
    statistics.broadcast(9.0, (), cold=False, expected_s=10.0)
    assert list(statistics.measurements.late_s) == [12.0, 0.0]
    assert spread_s(priced(), statistics, 0.0) == pytest.approx(SLACK_SHARE * SLACK_S - 12)
    assert spread_s(priced(), measured(t_bcast_s=SLACK_S + 1), 0.0) == 0


def test_a_late_version_is_forgotten_after_eight_versions() -> None:
    """A version is late if it takes longer than its plan predicted. Without a prediction it is late
    if it takes longer than the slack.
    """
    for took_s, expected_s in ((60.0, 10.0), (SLACK_S + 1, None)):
        statistics = measured()
        statistics.broadcast(took_s, (), cold=False, expected_s=expected_s)
        assert spread_s(priced(), statistics, 0.0) == 0
        for _ in range(LATE_MAX):
            statistics.broadcast(20.0, (), cold=False, expected_s=15.0)
        assert spread_s(priced(), statistics, 0.0) == pytest.approx(SLACK_SHARE * SLACK_S - 5)
