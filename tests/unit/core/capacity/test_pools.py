"""The pool with the cheapest step is found, and only few pools are simulated for it."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from echo2d.core.capacity.model import Demand
from echo2d.core.capacity.pipeline import Pipeline, lengths_of
from echo2d.core.capacity.pools import PLAYED_MORE, Pools, StepTimes
from echo2d.core.capacity.worker_cost import WorkerOffer
from tests.support.pools import Liquid, pools_of

# 256 trajectories in 100 s; a worker of 4 slots makes 0.2/s.
DEMAND = Demand(
    100.0, 256, 1, 1, 5.0, pause_s=2.0, recompute_s=3.0, group_size=8, lengths=lengths_of(0.6), group_patience=3.0,
)  # fmt: skip


def workers(count: int, usd_per_h: float = 0.4) -> list[WorkerOffer]:
    return [WorkerOffer(f"w{number}", 0.2, usd_per_h, slots=4) for number in range(count)]


def usd_of(count: int, learner_usd_per_h: float, usd_per_h: float = 0.4) -> float:
    """As played for this pool itself."""
    step_s = Pipeline(DEMAND, [20.0] * (4 * count)).step_s()
    return (learner_usd_per_h + count * usd_per_h) * step_s / 3600.0


@pytest.mark.parametrize("learner_usd_per_h", [1.0, 12.0, 100.0])
def test_no_pool_is_cheaper_than_the_one_that_is_found(learner_usd_per_h: float) -> None:
    pools = Pools(DEMAND, workers(60), learner_usd_per_h).played()
    least = min(usd_of(count, learner_usd_per_h) for count in range(3, 61))
    assert usd_of(pools.best.workers, learner_usd_per_h) <= 1.02 * least
    played = usd_of(pools.best.workers, learner_usd_per_h)
    assert pools.best.usd_per_step == pytest.approx(played, rel=0.02)


def test_an_expensive_learner_gets_more_workers_and_a_cheap_one_waits() -> None:
    chosen = [
        Pools(DEMAND, workers(60), usd).played().best.workers for usd in (0.5, 4.0, 20.0, 200.0)
    ]
    assert chosen == sorted(chosen)
    assert chosen[0] < 13 < chosen[-1], "13 workers make R / T"


def test_few_pools_are_simulated() -> None:
    pools = Pools(DEMAND, workers(500), 12.0)
    plays = 0
    while pools.play():
        plays += 1
    assert plays <= 12 + PLAYED_MORE


def test_the_curve_is_kept_while_its_inputs_hardly_change() -> None:
    first = Pools(DEMAND, workers(40), 12.0).played()
    times = first.times
    assert times.holds_for(replace(DEMAND, t_train_s=103.0, t_bcast_s=6.0), workers(40))
    assert not times.holds_for(replace(DEMAND, t_bcast_s=60.0), workers(40))
    assert not times.holds_for(replace(DEMAND, publish_every=2), workers(40))
    dearer = Pools(DEMAND, workers(40, 4.0), 12.0, times)
    assert not dearer.play(), "new prices need no play"
    assert dearer.best.workers < first.best.workers


def test_workers_that_seem_slower_need_a_larger_pool() -> None:
    pools, slower = pools_of(workers(60), 5.0), pools_of(workers(60), 5.0, slower=1.2)
    assert pools is not None
    assert slower is not None
    assert slower.best.mu == pytest.approx(1.2 * pools.best.mu, rel=0.05)
    assert slower.step_s(6.0) == pools.step_s(5.0)


def test_no_pool_is_best_without_workers() -> None:
    none = Pools(DEMAND, [], 12.0).played()
    assert (none.best.workers, none.best.usd_per_step, none.why()) == (0, math.inf, "")
    assert none.bubble(0.0) == 1.0
    hopeless = Pools(replace(DEMAND, flat=1.0), workers(3), 12.0).played()
    assert hopeless.best.workers == 0


def test_the_time_of_a_pool_is_interpolated_between_simulated_pools() -> None:
    pools = Pools(DEMAND, workers(60), 12.0).played()
    took = [pools.step_s(0.2 * count) for count in range(3, 60)]
    assert took == sorted(took, reverse=True) or all(
        later <= 1.03 * before for before, later in pairwise(took)
    )
    assert pools.step_s(1e-9) > 1e9
    assert StepTimes(DEMAND, []).step_s(1.0) == math.inf
    assert Liquid(2.0).step_s(1.0) == 20.0


def test_the_reason_names_the_prices_of_neighbouring_pools() -> None:
    pools = pools_of(workers(30), 4.0)
    assert pools is not None
    assert (
        pools.why()
        == "20 workers cost 0.07778 usd a step; 18 would cost 0.08395, 22 would cost 0.08"
    )
