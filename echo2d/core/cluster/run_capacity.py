"""What follows from a run's rules and measurements: how often it publishes, and how long a version may spread.

Not here: the formulas (`capacity/model`), and which workers are active (`coordinator/activation_loop`).
"""

from echo2d.core.capacity.demand import CapacityPlanner
from echo2d.core.cluster.statistics import Statistics
from echo2d.core.rules.run import RunRules


def publish_every(rules: RunRules, statistics: Statistics) -> int:
    """kappa as the rules name it, or as it follows from the measurements."""
    return CapacityPlanner(rules, statistics.measurements).publish_every()


def spread_s(rules: RunRules, statistics: Statistics, waited_s: float) -> float | None:
    """Seconds that a version may spread; None: the seed's bytes cost nothing, so the time does not matter.

    In a run that pays for what its seed sends, the seed sends the fewest copies that arrive in this
    time. 0: there is no time to spare, or the run has not measured T_train, T_bcast and the time of a
    trajectory yet. waited_s: seconds since the publish.
    """
    measurements = statistics.measurements
    if not rules.seed_usd_per_gb_up:
        return None
    if measurements.t_gen.estimate is None:
        return 0.0
    capacity_planner = CapacityPlanner(rules, measurements)
    return capacity_planner.spread_s(publish_every(rules, statistics), waited_s)
