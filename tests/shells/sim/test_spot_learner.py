"""A learner whose host is sometimes taken away: the plan, and the simulation."""

from dataclasses import replace
from statistics import fmean

import pytest

from echo2d.plan.fleet.forecast import provision
from echo2d.plan.fleet.spec import FleetSpec, LearnerTable, load_fleet
from echo2d.plan.fleet.spot_learner import SpotLearner
from echo2d.plan.fleet.world import FleetWorld
from tests.support.paths import REPO

STAYS = LearnerTable(t_train_s=100.0, trajectories_per_step=8, staleness_max=1, uplink_mbps=100.0)
SPOT = replace(STAYS, stay_h=1.0, notice_s=30.0, restart_s=360.0, checkpoint_every=5)


def test_a_host_that_is_never_taken_away_costs_nothing_more() -> None:
    assert SpotLearner.of(STAYS) == SpotLearner(100.0, 1.0, 1.0)
    assert SpotLearner.of(replace(STAYS, checkpoint_s=50.0, checkpoint_every=5)).t_train_s == 110.0


def test_the_plan_of_a_spot_learner_equals_the_worked_example() -> None:
    """An hour there, six minutes away. With a notice half a step is lost, without one two more steps."""
    warned = SpotLearner.of(SPOT)
    assert warned.longer == pytest.approx(3960 / 3550)
    assert warned.paid == pytest.approx(3600 / 3960)
    silent = SpotLearner.of(replace(SPOT, notice_s=0.0))
    assert silent.longer == pytest.approx(3960 / 3350)
    assert SpotLearner.of(replace(SPOT, checkpoint_s=31.0)).longer > silent.longer, (
        "too short a notice"
    )
    assert SpotLearner.of(replace(SPOT, stay_h=0.01)).longer == float("inf")


def fleet(**learner: float) -> FleetSpec:
    found = load_fleet(REPO / "scenarios/mix-spot-learner.toml")
    return replace(
        found,
        learner=replace(found.learner, trajectories_per_step=64, **learner),  # type: ignore[arg-type]
        simulate=replace(found.simulate, hours=120.0),
    )


@pytest.mark.nightly
@pytest.mark.parametrize(
    "learner", [{"stay_h": 4.0}, {"stay_h": 4.0, "notice_s": 0.0, "checkpoint_every": 3}]
)
def test_a_step_takes_as_long_as_is_planned(learner: dict[str, float]) -> None:
    """Mean of four draws of when its host is taken. The bubble does not count the time without a host."""
    spec = fleet(**learner)
    played = [
        FleetWorld(replace(spec, simulate=replace(spec.simulate, rng_seed=seed))).run()
        for seed in range(4)
    ]
    assert sum(each["learner_losses"] for each in played) > 60
    assert max(each["bubble"] for each in played) < 0.01
    step_s = 3600.0 * spec.simulate.hours / fmean(each["steps"] for each in played)
    assert step_s == pytest.approx(provision(spec).step_s, rel=0.05)
