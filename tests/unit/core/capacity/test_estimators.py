"""Estimates follow changes, and ignore outliers."""

import math
import random

import pytest

from echo2d.core.capacity.estimators import Share, Smoothed, Tail, WorkerRate


def smoothed(*samples: float) -> Smoothed:
    found = Smoothed()
    for sample in samples:
        found.add(sample)
    return found


def value(found: Smoothed | Tail) -> float:
    estimate = found.estimate
    assert estimate is not None
    return estimate.value


def test_an_estimate_is_unknown_before_the_first_sample() -> None:
    assert Smoothed().estimate is None
    assert Tail().estimate is None
    first = smoothed(3.0).estimate
    assert first is not None
    assert (first.value, first.sd) == (3.0, math.inf)


@pytest.mark.parametrize("at", [0, 2, 30])
def test_an_outlier_hardly_changes_an_estimate(at: int) -> None:
    samples = [10.0 + 0.1 * (index % 5 - 2) for index in range(40)]
    samples[at] = 10_000.0
    assert value(smoothed(*samples)) == pytest.approx(10.0, rel=0.02)


def test_an_estimate_follows_a_change() -> None:
    samples = [10.0 + 0.1 * (index % 3) for index in range(20)] + [
        20.0 + 0.1 * (index % 3) for index in range(30)
    ]
    assert value(smoothed(*samples)) == pytest.approx(20.1, rel=0.03)


def test_the_uncertainty_of_an_estimate_is_that_of_a_mean() -> None:
    chance = random.Random(1)
    found = [smoothed(*(chance.gauss(10.0, 1.0) for _ in range(100))).estimate for _ in range(200)]
    values = [each.value for each in found if each is not None]
    spread = math.sqrt(sum((one - 10.0) ** 2 for one in values) / len(values))
    said = sum(each.sd for each in found if each is not None) / len(found)
    assert said == pytest.approx(spread, rel=0.3)


def test_the_tail_is_the_second_largest_of_the_newest_samples() -> None:
    found = Tail()
    for sample in [99.0] * 40 + [float(one) for one in range(32)]:
        found.add(sample)
    assert value(found) == 30.0


def test_a_newcomer_has_the_configured_rate() -> None:
    rate = WorkerRate(prior=0.1, group_size=8, memory_s=1000.0)
    assert (rate.estimate.value, rate.estimate.sd) == (0.1, 0.1)
    for _ in range(50):
        rate.add(8, 40.0)
    assert rate.estimate.value == pytest.approx(0.2, rel=0.03)
    assert rate.estimate.sd == pytest.approx(0.2 / math.sqrt(25), rel=0.1)


def test_time_without_leases_does_not_lower_a_rate() -> None:
    rate = WorkerRate(prior=0.1, group_size=1, memory_s=1000.0)
    before = rate.estimate
    rate.add(0, 0.0)
    assert rate.estimate == before


def test_an_impossible_rate_is_bounded() -> None:
    rate = WorkerRate(prior=0.1, group_size=1, memory_s=1000.0)
    rate.add(1_000_000, 1.0)
    assert rate.made <= 100.0


def test_discarded_answers_are_forgotten_after_a_while() -> None:
    share = Share()
    share.add(100, 100)
    assert share.estimate.value == pytest.approx(0.5, rel=0.02)
    share.add(50_000, 0)
    assert share.estimate.value < 0.001
    assert 0 < share.estimate.sd < 0.001
