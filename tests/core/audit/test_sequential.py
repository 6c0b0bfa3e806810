"""Sequential tests over a worker's trajectories."""

import random

import pytest

from echo2d.core.audit.sequential import FLAGS_HONEST, THRESHOLD, FlagTest, ShiftTest


def test_five_flags_in_a_row_convict_and_four_do_not() -> None:
    test = FlagTest()
    for count in range(1, 6):
        test.add(flagged=True)
        assert test.convicts == (count == 5)


def test_a_worker_that_was_honest_for_long_is_convicted_as_fast() -> None:
    test = FlagTest()
    for _ in range(10_000):
        test.add(flagged=False)
    assert test.sum == 0
    for _ in range(5):
        test.add(flagged=True)
    assert test.convicts


@pytest.mark.parametrize("rng_seed", range(3))
def test_flags_at_the_honest_rate_do_not_convict(rng_seed: int) -> None:
    rng, test, highest = random.Random(rng_seed), FlagTest(), 0.0
    for _ in range(20_000):
        test.add(flagged=rng.random() < FLAGS_HONEST)
        highest = max(highest, test.sum)
    assert highest < THRESHOLD, f"rng_seed={rng_seed}"


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_lasting_shift_convicts_on_either_side(sign: float) -> None:
    rng, test, count = random.Random(1), ShiftTest(), 0
    while not test.convicts and count < 1000:
        test.add(rng.gauss(sign * 0.5, 1.0))
        count += 1
    assert 30 < count < 300


def test_one_outlier_counts_as_no_more_than_four() -> None:
    test, usual = ShiftTest(), ShiftTest()
    test.add(1e9)
    usual.add(4.0)
    assert test.sums == usual.sums
