"""The kept samples have the largest contrast for any rewards, and equal rewards have no spread at all."""

import math
import statistics
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2d.core.work.training.contrast import SPREAD_MAX, most_contrasting, spread

REWARDS = st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0, -2.0]), min_size=1, max_size=9)


@given(REWARDS)
def test_the_spread_is_the_standard_deviation_and_zero_for_equal_rewards_alone(
    rewards: list[float],
) -> None:
    assert math.isclose(spread(rewards), statistics.pstdev(rewards), abs_tol=1e-12)
    assert (spread(rewards) == 0) == (len(set(rewards)) == 1)


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=9))
def test_the_spread_of_any_rewards_is_a_number(rewards: list[float]) -> None:
    assert 0 <= spread(rewards) <= SPREAD_MAX


@given(REWARDS, st.integers(1, 6))
def test_no_other_choice_has_more_contrast(rewards: list[float], count: int) -> None:
    """The contrast of a choice: the sum of its higher half less that of its lower half."""
    by_sample = dict(enumerate(rewards))
    kept = most_contrasting(by_sample, count)
    assert len(kept) == min(count, len(rewards))

    def contrast(samples: tuple[int, ...]) -> float:
        ordered, half = sorted(by_sample[sample] for sample in samples), len(samples) // 2
        return sum(ordered[len(samples) - half :]) - sum(ordered[:half])

    most = max(map(contrast, combinations(by_sample, len(kept))))
    assert math.isclose(contrast(tuple(kept)), most, abs_tol=1e-12)
    if count > 1:
        chosen = {by_sample[sample] for sample in kept}
        assert {max(rewards), min(rewards)} <= chosen
    backwards = dict(reversed(by_sample.items()))
    assert most_contrasting(backwards, count) == kept


@pytest.mark.parametrize(
    ("right", "kept"),
    [(0, "0000"), (1, "1000"), (2, "1100"), (5, "1100"), (7, "1110"), (8, "1111")],
)
def test_four_of_eight_answers_are_kept(right: int, kept: str) -> None:
    rewards = {sample: float(sample < right) for sample in range(8)}
    found = most_contrasting(rewards, 4)
    assert sorted((rewards[sample] for sample in found), reverse=True) == [*map(float, kept)]


def test_the_first_samples_are_kept_if_rewards_are_equal() -> None:
    assert most_contrasting(dict.fromkeys(range(8), 1.0), 4) == {0, 1, 2, 3}
    assert most_contrasting({0: 1.0, 1: 0.0, 2: 1.0, 3: 0.0, 4: 1.0, 5: 0.0}, 4) == {0, 2, 1, 3}
