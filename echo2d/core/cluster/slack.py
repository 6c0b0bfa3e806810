"""How long the next version may take to spread before anything waits for it, as a run has measured.

Only a run that pays for what its seed sends asks: it then sends as few copies as there is time for.
Not here: the formula (`capacity/model`), and the plan (`topology/few_copies`).
"""

from echo2d.core.capacity.demand import CapacityPlanner, CapacityRules
from echo2d.core.cluster.rules import RunRules
from echo2d.core.cluster.statistics import Statistics


def capacity_rules(rules: RunRules) -> CapacityRules:
    """The numbers of a run that decide what its learner needs."""
    return CapacityRules(
        rules.trajectories_per_step,
        rules.staleness_max,
        rules.group_size,
        rules.mode,
        rules.gamma,
        rules.by_cost,
    )


def spread_s(rules: RunRules, statistics: Statistics, waited_s: float) -> float | None:
    """Seconds that a version may spread; None: the seed's bytes cost nothing, so nobody asks.

    0 where there is no time to spare, and until the run has measured T_train, T_bcast and the time
    of a trajectory. waited_s: since the publish.
    """
    measurements = statistics.measurements
    if not rules.seed_usd_per_gb_up:
        return None
    if measurements.t_gen.estimate is None:
        return 0.0
    kappa = rules.publish_every or statistics.publish_every(rules.staleness_max)
    return CapacityPlanner(capacity_rules(rules), measurements).spread_s(kappa, waited_s)
