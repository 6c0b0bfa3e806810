"""The number of tokens that an answer still needs, compared with drawn lengths."""

import random
from statistics import fmean

import pytest

from echo2d.core.work.training.answer_lengths import AnswerLengths

SEED = 26


def drawn(of_prompt: float, of_sample: float, groups: int = 2000, size: int = 8) -> list[list[int]]:
    """Lengths by group: about 100 tokens, with these deviations of their logarithm."""
    chance = random.Random(SEED)
    return [
        [round(chance.lognormvariate(4.6 + prompt, of_sample)) for _ in range(size)]
        for prompt in (chance.gauss(0.0, of_prompt) for _ in range(groups))
    ]


def learnt(groups: list[list[int]]) -> AnswerLengths:
    lengths = AnswerLengths()
    for group in groups:
        lengths.finished("", group)
    return lengths


@pytest.mark.parametrize("written", [0, 50, 100, 300])
def test_the_expected_rest_is_what_earlier_answers_of_this_length_still_needed(
    written: int,
) -> None:
    groups = drawn(0.0, 0.8)
    left = fmean(each - written for group in groups for each in group if each > written)
    assert learnt(groups).left(written) == pytest.approx(left, rel=0.25)


def test_the_longer_an_answer_is_the_longer_it_still_takes() -> None:
    lengths = learnt(drawn(0.5, 0.5))
    left = [lengths.left(written) for written in (100, 200, 400, 800, 10_000, 10**6)]
    assert left == sorted(left)


def test_siblings_predict_a_length_as_far_as_the_prompt_decides_it() -> None:
    by_prompt, by_chance = learnt(drawn(0.8, 0.1)), learnt(drawn(0.0, 0.8))
    long, short = [400, 400], [30, 30]
    assert by_prompt.left(10, siblings=long) > 8 * by_prompt.left(10, siblings=short)
    assert by_chance.left(10, siblings=long) == pytest.approx(
        by_chance.left(10, siblings=short), rel=0.25
    )


def test_a_row_with_long_answers_is_expected_to_have_long_ones_again() -> None:
    lengths = learnt(drawn(0.8, 0.1))
    lengths.finished("long", [800] * 8)
    lengths.finished("short", [20] * 8)
    assert lengths.left(0, "long") > 10 * lengths.left(0, "short")
    assert lengths.left(0, "another") == pytest.approx(lengths.left(0))


@pytest.mark.parametrize("group", [[5], [7, 7, 7], [1, 100_000], [0, 0]])
def test_a_few_strange_lengths_still_give_a_finite_number(group: list[int]) -> None:
    lengths = AnswerLengths()
    lengths.finished("row", group)
    for written in (0, 1, 6, 10**7):
        assert 0 < lengths.left(written, "row", group) < 10**9
