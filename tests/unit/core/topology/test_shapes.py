import pytest

from echo2d.core.topology.shapes import PLANNERS, plan_shape
from tests.support.plans import ABCD, JOB, ONE, SEED


@pytest.mark.parametrize("shape", PLANNERS)
def test_every_registered_planner_makes_a_sound_plan(shape: str) -> None:
    plan = plan_shape(shape, ONE, JOB, SEED, ABCD, chains=2)
    plan.check()
    assert (plan.plan_id, plan.generation, plan.job) == (ONE, 0, JOB)
    assert plan.facts().keys() == {one.peer for one in (SEED, *ABCD)}


@pytest.mark.parametrize("shape", PLANNERS)
def test_every_registered_planner_plans_for_no_peers(shape: str) -> None:
    plan = plan_shape(shape, ONE, JOB, SEED, [])
    plan.check()
    assert plan.root == SEED.peer


def test_the_shape_chain_has_a_stripe_for_each_chain() -> None:
    assert len(plan_shape("chain", ONE, JOB, SEED, ABCD, chains=2).stripes) == 2
