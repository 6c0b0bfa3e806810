"""Right answers of the walk task, the table of runs, and the results of the recorded runs."""

from typing import Any

import pytest

from echo2d_lab.research.patience_length import (
    EQUAL,
    RUNS,
    SEEDS,
    SETTINGS,
    Answers,
    Case,
    facts,
    table,
)
from echo2d_lab.research.staleness_sweep import finished
from echo2d_lab.research.walk_task import (
    EOS,
    EQUALS,
    HELD_OUT,
    MAX_NEW_TOKENS,
    MOVES,
    PLACE_ZERO,
    PLACES,
    TRAINED,
    Walk,
    reward,
    worked_out,
)


def run(setting: str, seed: int, accuracy: float) -> dict[str, Any]:
    looks = [[20 * at, 400.0 * at, accuracy, 20.0, accuracy / 2, 40.0] for at in range(5)]
    return {
        "setting": setting, "seed": seed, "looks": looks, "began": [1100, 20.0, 0.5],
        "trained": [1000, 19.0, 0.5], "cancelled": [50, 60.0, 0.9], "left_out": 0.01, "dropped": 0.02, "bubble": 0.0,
        "virtual_s": 3600,
    }  # fmt: skip


def test_only_the_last_place_counts_and_each_move_takes_two_tokens() -> None:
    for prompt, moves in zip(HELD_OUT, MOVES, strict=True):
        whole = worked_out(prompt.tokens)
        assert len(whole) == 2 * moves
        assert len(whole) + 3 < MAX_NEW_TOKENS
        assert reward(prompt.tokens, [*whole, EQUALS, whole[-1], EOS]) == 1.0
        guesses = [[EQUALS, PLACE_ZERO + place, EOS] for place in range(PLACES)]
        assert sum(reward(prompt.tokens, guess) for guess in guesses) == 1.0
        assert reward(prompt.tokens, [*whole, EQUALS, whole[-1]]) == 0.0


def test_no_prompt_of_training_is_held_out() -> None:
    assert len({prompt.tokens for prompt in [*TRAINED, *HELD_OUT]}) == len(MOVES) * PLACES
    drawn = [Walk(0).prompt(index) for index in range(50)]
    assert drawn == [Walk(0).prompt(index) for index in range(50)]
    assert all(prompt in TRAINED for prompt in drawn)


def test_settings_are_compared_seed_by_seed() -> None:
    runs = [
        run("0", 0, 0.5),
        run("0", 1, 0.7),
        run("3", 0, 0.6),
        run("3", 1, 0.8),
        run("3", 2, 0.1),
    ]
    head, *rows = table(runs)
    assert head == ["", "0, 2 seeds", "3, 3 seeds", "3 - 0"]
    assert rows[0] == ["accuracy, end", "0.6", "0.5", "+0.1 (+0.1 to +0.1)"]
    assert len(rows) == len(facts(runs[0]))


def test_answers_are_counted_with_their_mean() -> None:
    prompt = HELD_OUT[0].tokens
    right = [*worked_out(prompt), EQUALS, worked_out(prompt)[-1], EOS]
    assert Answers.of([(prompt, right), (prompt, [EQUALS])]) == (2, 3.0, 0.5)
    assert Answers.of([]) == (0, 0.0, 0.0)


def test_every_case_has_its_runs_and_the_reference_loses_nothing() -> None:
    rows = finished(RUNS)
    planned = {Case(setting, seed) for setting in SETTINGS for seed in SEEDS}
    assert planned <= {Case(row["setting"], row["seed"]) for row in rows}
    for row in rows:
        if row["setting"] == EQUAL:
            assert row["left_out"] == row["dropped"] == 0.0
            assert Answers(*row["trained"]).tokens == pytest.approx(
                Answers(*row["began"]).tokens, rel=0.01
            )
