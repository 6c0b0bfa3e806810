"""Prices of pools that make a liquid: a step takes as long as its training or its rollouts, whichever is longer."""

from collections.abc import Sequence

from echo2d.core.capacity.demand import more_like_the_last
from echo2d.core.capacity.model import Demand
from echo2d.core.capacity.pools import Pools, StepTimes
from echo2d.core.capacity.worker_cost import WorkerOffer, by_rho

DEMAND = Demand(10.0, 100, 4, 1, 0.0)
# With workers of 1 usd/h and 1 trajectory/s, the cheapest pool is the one that makes exactly what is needed.
LEARNER_USD_PER_H = 20.0


class Liquid(StepTimes):
    """needs: trajectories/s with which the learner never waits."""

    def __init__(self, needs: float) -> None:
        super().__init__(DEMAND, ())
        self.needs = needs

    def steps_s(self, makes: Sequence[float]) -> list[float]:
        needs = [self.needs / mu if mu > 0 else float("inf") for mu in makes]
        return [DEMAND.t_train_s * max(1.0, each) for each in needs]


def pools_of(
    offers: Sequence[WorkerOffer],
    needs: float | None,
    *,
    learner_usd_per_h: float = LEARNER_USD_PER_H,
    slower: float = 1.0,
) -> Pools | None:
    """Pools of these workers and of more like the most expensive one; None: the needed throughput is unknown."""
    if needs is None:
        return None
    ranked = by_rho(offers)
    ranked += more_like_the_last(ranked, 3 * needs)
    return Pools(DEMAND, ranked, learner_usd_per_h, Liquid(needs), slower=slower)
