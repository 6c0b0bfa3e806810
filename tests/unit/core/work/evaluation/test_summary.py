"""Mean, standard error and pass@k, compared with numbers computed by hand and by brute force."""

import math
from itertools import combinations

import pytest

from echo2d.core.base.ids import Digest, Version
from echo2d.core.protocol.trajectory import RewardPart
from echo2d.core.work.evaluation.events import Evaluated, PassAt
from echo2d.core.work.evaluation.summary import (
    SUMMARY_PARTS_MAX,
    ScoredSample,
    best_by_name,
    summed_up,
)


def row(*rewards: float, tokens: int = 4, truncated: bool = False) -> list[ScoredSample]:
    return [
        ScoredSample(reward, (RewardPart("form", reward / 2),), tokens, truncated)
        for reward in rewards
    ]


def test_an_evaluation_without_scores_has_no_numbers() -> None:
    found = summed_up([], 4, solved_at=1.0)
    assert math.isnan(found.mean)
    assert math.isnan(found.se)
    assert found.passes == ()


def test_the_best_score_covers_all_questions_and_the_newest_wins_a_tie() -> None:
    def found(number: int, mean: float, rows: int = 9, name: str = "math") -> Evaluated:
        told = (rows, 9, 1, mean, 0.1, (), (), 0.0, 1.0, 1.0)
        return Evaluated(number, name, Version(number), Digest(bytes(32)), *told)

    known = [found(1, 0.5), found(2, 0.7), found(3, 0.7), found(4, 0.9, rows=8), found(5, math.nan)]
    assert best_by_name([*known, found(6, 0.1, name="io")], lambda _: True) == {
        "math": known[2],
        "io": found(6, 0.1, name="io"),
    }
    assert best_by_name(known, lambda each: each.number < 2) == {"math": known[0]}


def test_one_answer_to_each_question_gives_mean_and_standard_error() -> None:
    found = summed_up([row(1), row(0), row(1), row(1)], 1, solved_at=1.0)
    assert found.mean == 0.75
    # The sample variance of 1, 0, 1, 1 is 0.25.
    assert found.se == pytest.approx(math.sqrt(0.25 / 4))
    assert found.passes == (PassAt(1, 0.75),)
    assert found.parts == (RewardPart("form", 0.375),)


def test_several_answers_to_a_question_do_not_count_as_independent() -> None:
    """Whole questions vary: twice the same answers do not halve the variance."""
    once = summed_up([row(1), row(0)], 1, solved_at=1.0)
    twice = summed_up([row(1, 1), row(0, 0)], 2, solved_at=1.0)
    assert once.se == twice.se == 0.5


def test_a_single_question_has_no_standard_error() -> None:
    assert math.isnan(summed_up([row(1, 0)], 2, solved_at=1.0).se)


@pytest.mark.parametrize("right", range(6))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(right: int) -> None:
    answers = [1.0] * right + [0.0] * (5 - right)
    found = summed_up([row(*answers)], 5, solved_at=1.0)
    for each in found.passes:
        subsets = list(combinations(answers, each.k))
        assert each.share == pytest.approx(sum(map(any, subsets)) / len(subsets))
    assert [each.k for each in found.passes] == [1, 2, 4]


def test_the_summary_has_lengths_and_the_share_of_truncated_answers() -> None:
    rows = [row(0.5, tokens=10, truncated=True), row(1.0, tokens=20)]
    found = summed_up(rows, 1, solved_at=0.5)
    assert (found.tokens, found.truncated, found.passes) == (15, 0.5, (PassAt(1, 1.0),))


def test_extreme_rewards_have_no_standard_error_and_the_number_of_parts_is_limited() -> None:
    found = summed_up([row(1e200), row(-1e200)], 1, solved_at=1.0)
    assert not math.isfinite(found.se)
    names = [RewardPart(f"part {number:03}", 1.0) for number in range(100)]
    many = [[ScoredSample(1.0, (name,), 1, truncated=False)] for name in names]
    assert len(summed_up(many, 1, solved_at=1.0).parts) == SUMMARY_PARTS_MAX
