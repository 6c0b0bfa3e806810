"""Learning rates over a run of 12 steps, of which two warm up."""

from itertools import pairwise

import pytest

from echo2d.learner.objective.schedule import LrSchedule, lr_share

STEPS, WARM_UP = 12, 2


def shares(
    schedule: LrSchedule, last_share: float = 0.0, warmup_steps: int = WARM_UP
) -> list[float]:
    settings = {"steps": STEPS, "warmup_steps": warmup_steps, "last_share": last_share}
    return [lr_share(step, schedule=schedule, **settings) for step in range(1, STEPS + 1)]  # type: ignore[arg-type]


def test_a_constant_rate_is_reached_at_the_end_of_the_warm_up() -> None:
    assert shares("constant") == [0.5] + [1.0] * 11
    assert shares("constant", warmup_steps=0) == [1.0] * 12


def test_a_linear_rate_falls_evenly_to_its_last_share() -> None:
    assert shares("linear") == pytest.approx([0.5, *[1 - step / 10 for step in range(11)]])
    assert shares("linear", 0.1)[-1] == pytest.approx(0.1)


def test_a_cosine_is_halfway_in_the_middle_and_falls_fastest_there() -> None:
    found = shares("cosine", 0.2)
    assert found[1] == 1.0
    assert found[6] == pytest.approx(0.6)
    assert found[-1] == pytest.approx(0.2)
    falls = [left - right for left, right in pairwise(found[1:])]
    assert max(falls) in falls[4:6]


def test_a_step_beyond_the_last_one_keeps_its_share() -> None:
    assert lr_share(99, steps=12, warmup_steps=2, schedule="cosine", last_share=0.1) == 0.1
