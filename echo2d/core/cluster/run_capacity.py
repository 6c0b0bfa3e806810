"""What a run's rules make of its measurements: how often it publishes, and how long a version may spread.

Not here: the formulas (`capacity/model`), and which workers are active (`coordinator/activation_loop`).
"""

from echo2d.core.capacity.demand import CapacityPlanner
from echo2d.core.cluster.statistics import Statistics
from echo2d.core.rules.run import RunRules


def publish_every(rules: RunRules, statistics: Statistics) -> int:
    """kappa: the one that the rules name, or the one that follows from the measurements."""
    return CapacityPlanner(rules, statistics.measurements).publish_every()


def spread_s(rules: RunRules, statistics: Statistics, waited_s: float) -> float | None:
    """Seconds that a version may spread; None: the seed's bytes cost nothing, so nobody asks.

    Only a run that pays for what its seed sends asks: it then sends as few copies as there is time
    for. 0 where there is no time to spare, and until the run has measured T_train, T_bcast and the time
    of a trajectory. waited_s: since the publish.
    """
    measurements = statistics.measurements
    if not rules.seed_usd_per_gb_up:
        return None
    if measurements.t_gen.estimate is None:
        return 0.0
    capacity_planner = CapacityPlanner(rules, measurements)
    return capacity_planner.spread_s(publish_every(rules, statistics), waited_s)
