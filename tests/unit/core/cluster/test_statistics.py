"""Quantiles, kappa under "auto", and bounded counters."""

import pytest

from echo2d.core.capacity.estimators import quantile
from echo2d.core.cluster.statistics import (
    FAULTS_SHOWN_MAX,
    VERSIONS_MEASURED_MAX,
    Statistics,
)


@pytest.mark.parametrize(
    ("values", "share", "found"),
    [
        ([], 0.5, None),
        ([3.0], 0.95, 3.0),
        ([1.0, 2.0], 0.5, 1.0),
        (list(map(float, range(1, 21))), 0.95, 19.0),
    ],
)
def test_quantile(values: list[float], share: float, found: float | None) -> None:
    assert quantile(values, share) == found


def test_it_is_said_when_no_kappa_is_longer_than_a_broadcast() -> None:
    statistics = Statistics()
    assert not statistics.dissemination_bound(0), "nothing is measured yet"
    for _ in range(16):
        statistics.measurements.t_train.add(1.0)
        statistics.broadcast(500.0, (), cold=False, most_s=1.5)
    assert not statistics.dissemination_bound(3)
    assert statistics.dissemination_bound(0)


def test_faults_and_versions_are_bounded() -> None:
    statistics = Statistics()
    for number in range(2 * VERSIONS_MEASURED_MAX):
        statistics.fault("lease", f"worker {number}\nis gone")
        statistics.seed_sent(number, 1.0)
    statistics.check()
    assert len(statistics.faults) == FAULTS_SHOWN_MAX
    assert next(reversed(statistics.faults)) == (
        "lease",
        f"worker {2 * VERSIONS_MEASURED_MAX - 1} is gone",
    )
    assert statistics.fault_counts == {"lease": 2 * VERSIONS_MEASURED_MAX}


def test_the_same_fault_again_is_one_line_and_the_newest() -> None:
    statistics = Statistics(now=10.0)
    statistics.fault("lease", "a")
    statistics.fault("lease", "b")
    statistics.now = 12.0
    statistics.fault("lease", "a")
    assert [(text, fault.at, fault.times) for (_, text), fault in statistics.faults.items()] == [
        ("b", 10.0, 1),
        ("a", 12.0, 2),
    ]


def test_the_bubble() -> None:
    statistics = Statistics()
    assert (statistics.bubble_ratio, statistics.bubble(1)) == (None, None)
    for _ in range(2):
        statistics.session_opened()
        statistics.now += 1000.0  # the learner starts; that is no waiting
        for step in range(3):
            statistics.trained(step, (), 3.0)
            statistics.now += 4.0
    assert statistics.bubble_ratio == 0.25
    assert (statistics.learner_train_s, statistics.learner_wait_s) == (12.0, 4.0)
    assert statistics.bubble(1) == 0.0, "it did not wait for data"
    statistics.learner_waits(waits=True)
    statistics.now += 4.0
    assert statistics.bubble(1) == 0.5
    statistics.learner_waits(waits=False)
    assert statistics.bubble(1) == 0.5
    assert statistics.starved_s == 4.0
    assert statistics.measurements.t_train.value == 3.0


def test_what_it_waits_for() -> None:
    statistics = Statistics()
    for step in range(3):
        statistics.trained(step, (), 1.0)
        statistics.learner_waits(waits=True)
        statistics.now += 1.0
        statistics.learner_waits(waits=True, lacks_rewards=True)
        statistics.now += 3.0
        statistics.learner_waits(waits=False)
        statistics.now += 1.0
    assert statistics.unscored_share(16) == 0.75
    assert (statistics.starved_s, statistics.unscored_s) == (12.0, 9.0)
    statistics.trained(3, (), 1.0)
    assert statistics.unscored_share(2) == 0.75
    statistics.learner_waits(waits=True)
    statistics.now += 8.0
    assert statistics.unscored_share(2) == 6.0 / 16.0
