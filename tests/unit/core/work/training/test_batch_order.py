"""Every step has the exact share of each task, within one group, and no error adds up."""

import random
from fractions import Fraction

import pytest

from echo2d.core.work.training.batch_order import Quotas

MIXES = [
    (["0.5", "0.3", "0.2"], 4),
    (["0.5", "0.3", "0.2"], 7),
    (["1"], 3),
    (["1", "1", "1"], 2),
    (["0.9999", "0.0001"], 8),
    (["2", "6"], 8),
]


@pytest.mark.parametrize(("weights", "groups"), MIXES)
def test_each_step_and_every_sum_of_steps_has_each_share_within_one_group(
    weights: list[str], groups: int
) -> None:
    fractions = [Fraction(weight) for weight in weights]
    quotas, total = Quotas(fractions, groups), sum(fractions)
    exact = [weight * groups / total for weight in fractions]
    had = [0] * len(weights)
    for step in range(1, 1001):
        found = quotas.of(step)
        assert sum(found) == groups
        assert all(abs(each - share) < 1 for each, share in zip(found, exact, strict=True))
        had = [before + each for before, each in zip(had, found, strict=True)]
        assert all(abs(each - step * share) <= 1 for each, share in zip(had, exact, strict=True)), (
            step,
            had,
        )


def test_whole_shares_are_the_same_in_every_step() -> None:
    quotas = Quotas([Fraction(2), Fraction(6)], 8)
    assert {quotas.of(step) for step in range(1, 50)} == {(2, 6)}


def test_a_step_has_the_same_quotas_whenever_it_is_asked_for() -> None:
    weights, steps = [Fraction("0.37"), Fraction("0.21"), Fraction("0.42")], list(range(1, 500))
    in_order = Quotas(weights, 5)
    told = {step: in_order.of(step) for step in steps}
    random.Random(0).shuffle(steps)
    shuffled = Quotas(weights, 5)
    assert all(shuffled.of(step) == told[step] for step in steps)
