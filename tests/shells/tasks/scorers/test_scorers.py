"""The built-in scorers, each on typical answers of models."""

from typing import Any

import pytest

from echo2d.tasks.base import Answer
from echo2d.tasks.scorers.base import Expected, load_scorer


def score(name: str, text: str, expected: str, **options: Any) -> float:
    found = load_scorer(name, options)(Answer(text, "stop", 1), Expected(expected))
    return float(found)


@pytest.mark.parametrize(
    ("name", "text", "expected", "options", "value"),
    [
        ("exact", " Paris\n", "Paris", {}, 1.0),
        ("exact", "paris", "Paris", {}, 0.0),
        ("exact", "paris", "Paris", {"ignore_case": True}, 1.0),
        ("exact", "Paris.", "Paris", {}, 0.0),
        ("regex", "first 3, then 42.", "42", {"pattern": r"\d+"}, 1.0),
        ("regex", "x = 7; x = 8", "8", {"pattern": r"x = (\d+)"}, 1.0),
        ("regex", "none", "8", {"pattern": r"\d+"}, 0.0),
        ("choice", "The answer is (B).", "B", {}, 1.0),
        ("choice", "A? No: C", "C", {}, 1.0),
        ("choice", "CAB", "B", {}, 0.0),
        ("choice", "Z", "Z", {"letters": "XYZ"}, 1.0),
        ("math", "The answer is $\\frac{1}{2}$.", "1/2", {}, 1.0),
        ("math", "So we get \\boxed{2x + x}", "3x", {}, 1.0),
        ("math", "It is 1,000.", "1000", {}, 1.0),
        ("math", "It is 41", "42", {}, 0.0),
        ("math", "no idea", "42", {}, 0.0),
        ("math", "", "42", {}, 0.0),
    ],
)
def test_each_scorer_gives_an_answer_its_reward(
    name: str, text: str, expected: str, options: dict[str, Any], value: float
) -> None:
    assert score(name, text, expected, **options) == value


def test_a_users_function_scores_with_the_whole_row() -> None:
    scorer = load_scorer(f"{__name__}:letters", {"bonus": 0.5})
    assert scorer(Answer("abc", "length", 3), Expected("", {"letters": 3})) == 1.5


def letters(answer: Answer, expected: Expected, bonus: float) -> float:
    return float(len(answer.text) == expected.row["letters"]) + bonus
