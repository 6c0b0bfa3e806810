"""The rates of workers, from the samples that they hold and the answers that were accepted."""

import pytest

from echo2d.core.base.ids import PeerId
from echo2d.core.capacity.measurements import Measurements

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


def test_a_rate_is_the_accepted_answers_over_the_leased_slots() -> None:
    measurements = Measurements(1)
    measurements.holds(A, 4, 4, now=0.0)
    for number in range(100):
        measurements.accepted(A, float(number), now=number + 8.0)
    measurements.holds(A, 4, 0, now=100.0)  # and then nothing: that is not its fault
    measurements.settle(10.0, {}, now=1000.0)
    rate = measurements.rate(A)
    assert rate is not None
    assert rate.value == pytest.approx(1.0, rel=0.01)
    assert measurements.t_gen.estimate is not None
    assert measurements.t_gen.estimate.value == 8.0
    assert measurements.mu(B, 8, None) == pytest.approx(2.0, rel=0.01)
    assert measurements.mu(B, 8, 0.5) == 0.5
    measurements.check()


def test_a_standstill_does_not_lower_a_rate() -> None:
    measurements = Measurements(1)
    measurements.holds(A, 2, 2, now=0.0)
    measurements.stood_still(A, 50.0, now=100.0)
    for _ in range(50):
        measurements.accepted(A, 40.0, now=100.0)
    measurements.settle(10.0, {}, now=100.0)
    assert measurements.mu(A, 2, None) == pytest.approx(1.0)
    assert measurements.t_gen.estimate is not None
    assert measurements.t_gen.estimate.value == 10.0


def test_workers_on_standby_are_expected_to_have_the_rate_of_active_ones() -> None:
    measurements, both = Measurements(1), (A, B)
    for worker in both:
        measurements.holds(worker, 2, 2, now=0.0)
        for _ in range(200):
            measurements.accepted(worker, None, now=100.0)
    measurements.settle(10.0, {}, now=100.0)
    measurements.holds(B, 2, 0, now=100.0)
    for period in range(1, 60):  # answers become twice as long, and B makes none of them
        for _ in range(10):
            measurements.accepted(A, None, now=100.0 + 10 * period)
        measurements.settle(10.0, {}, now=100.0 + 10 * period)
        measurements.check()
    assert measurements.mu(A, 2, None) == pytest.approx(1.0, rel=0.05)
    assert measurements.mu(B, 2, None) == pytest.approx(measurements.mu(A, 2, None), rel=0.01)
    assert measurements.mu(PeerId("new"), 4, None) == pytest.approx(2.0, rel=0.05)
    measurements.holds(B, 2, 2, now=690.0)
    measurements.settle(10.0, {}, now=691.0)  # it begins where it is thought to be
    assert measurements.mu(B, 2, None) == pytest.approx(1.0, rel=0.05)


def test_moves_of_many_workers_leave_no_remainder() -> None:
    """Results come in bursts: most changes are small ones down, the others large ones up."""
    measurements, idle = Measurements(1), PeerId("idle")
    workers = [PeerId(f"w{number}") for number in range(5)]
    for worker in (*workers, idle):
        measurements.holds(worker, 4, 4, now=0.0)
        for _ in range(100):
            measurements.accepted(worker, None, now=100.0)
    measurements.settle(10.0, {}, now=100.0)
    measurements.holds(idle, 4, 0, now=100.0)
    for period in range(500):
        now = 100.0 + 10.0 * (period + 1)
        for number, worker in enumerate(workers):
            for _ in range(50 * (period % 5 == number)):
                measurements.accepted(worker, None, now=now)
        measurements.settle(10.0, {}, now=now)
    assert measurements.mu(idle, 4, None) == pytest.approx(1.0, rel=0.15)


def test_the_rate_of_a_newcomer_is_a_guess_until_it_has_worked() -> None:
    measurements = Measurements(1)
    assert measurements.guessed(A)
    measurements.holds(A, 2, 2, now=0.0)
    measurements.settle(10.0, {A: 1.0}, now=3.0)
    assert measurements.guessed(A), "so much of it could be chance"
    measurements.settle(10.0, {A: 1.0}, now=4.0)
    assert not measurements.guessed(A), "or it would stay one for ever, if it makes nothing"
    assert measurements.mu(A, 2, 1.0) == pytest.approx(0.5, rel=0.05)


def test_a_worker_that_cannot_be_used_makes_nothing() -> None:
    measurements = Measurements(1)
    measurements.holds(A, 2, 0, now=0.0)
    measurements.settle(10.0, {A: 1.0}, now=0.0)
    measurements.useless(A, 300.0)
    measurements.settle(10.0, {A: 1.0}, now=300.0)
    assert measurements.mu(A, 2, None) < 0.05


def test_rates_are_unknown_before_the_first_result() -> None:
    measurements = Measurements(4)
    measurements.holds(A, 2, 2, now=0.0)
    measurements.settle(10.0, {}, now=100.0)
    assert measurements.rate(A) is None
    assert measurements.mu(A, 2, None) == 0.0


def test_the_standstill_of_a_pool_is_weighted_by_the_rates_of_active_workers() -> None:
    """A makes three times as much as B with as many slots; C stands by."""
    measurements = Measurements(1)
    for worker in (A, B, C):
        measurements.holds(worker, 4, 0, now=0.0)
    assert measurements.version_served((A, B)) is None
    measurements.settle(10.0, {A: 3.0, B: 1.0, C: 9.0}, now=0.0)
    for worker, seconds in ((A, 1.0), (B, 3.0), (C, 50.0)):
        measurements.stood_still(worker, seconds, now=100.0)
    assert measurements.version_served((A, B)) == pytest.approx(1.5)
    assert measurements.still.estimate is not None
    assert measurements.still.estimate.value == pytest.approx(1.5)
    measurements.check()


def test_all_slots_count_alike_before_any_rate_is_known() -> None:
    measurements = Measurements(1)
    for worker, slots, seconds in ((A, 1, 1.0), (B, 3, 2.0)):
        measurements.holds(worker, slots, 0, now=0.0)
        measurements.stood_still(worker, seconds, now=10.0)
    assert measurements.version_served((A, B)) == pytest.approx(1.75)
