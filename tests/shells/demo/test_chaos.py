"""The processes that a demo's chaos kills, and when."""

from itertools import pairwise

import pytest

from echo2d.demo.chaos import LAST_SHARE, PAUSE_S_MAX, STEPS_MIN, VICTIM_KINDS, plan_kills
from echo2d.demo.run import STEPS, Demo
from echo2d.errors import OperatorFault


@pytest.mark.parametrize("rng_seed", range(20))
@pytest.mark.parametrize("steps", [STEPS_MIN, 13, STEPS, 1000])
def test_every_kind_of_process_is_killed_at_points_all_over_the_run(
    steps: int, rng_seed: int
) -> None:
    plan = plan_kills(steps, 3, rng_seed)
    assert {kill.kind for kill in plan} == set(VICTIM_KINDS)
    assert all(
        sum(kill.kind == kind for kill in plan) == 1 for kind in ("learner", "coordinator", "seed")
    )
    points = [kill.step for kill in plan]
    assert points == sorted(points)
    assert 1 <= points[0] < points[-1] <= LAST_SHARE * steps
    assert (
        max(later - point for point, later in pairwise([0, *points, int(LAST_SHARE * steps)]))
        <= 2 * steps / len(plan) + 1
    )
    assert {kill.name for kill in plan if kill.kind == "worker"} <= {
        "worker-1",
        "worker-2",
        "worker-3",
    }
    assert all(0 <= kill.pause_s <= PAUSE_S_MAX for kill in plan)


def test_workers_are_killed_again_and_again() -> None:
    assert sum(kill.kind == "worker" for kill in plan_kills(STEPS, 3, 0)) == STEPS // 16


def test_the_rng_seed_decides_which_processes_are_killed_and_when() -> None:
    assert plan_kills(STEPS, 3, 5) == plan_kills(STEPS, 3, 5) != plan_kills(STEPS, 3, 6)


def test_a_run_too_short_for_chaos_is_refused() -> None:
    with pytest.raises(OperatorFault, match="--chaos: expected at least 8 steps; found 7"):
        Demo(steps=7, chaos=True)
