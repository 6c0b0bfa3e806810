"""Finds the plan in which the seed sends the fewest copies, among those that are fast enough.

If the seed's uplink is metered, every copy costs money, and a version that arrives sooner than the
learner needs it earns nothing. `plan_within` tries one copy, and if that is too slow, looks for the
smallest bound on copies that is fast enough. If no plan is fast enough, the fastest one is taken,
whatever it costs.

Not here: how long a version may take (`capacity/model`, `capacity/demand`), and the trees
(`planner`).
"""

import math
from collections.abc import Sequence

from echo2d.core.base.ids import PlanId
from echo2d.core.topology.plan import SMALL_SWARM, Job, PeerFacts, Plan
from echo2d.core.topology.planner import NEAR, foretold_s, plan_at_most, plan_auto

# The bound on copies is searched in these steps; in a large swarm in steps of one copy, because
# there whole peers are placed below the seed.
COPIES_STEP = 0.25


def seed_copies(plan: Plan) -> float:
    """How many times the seed sends the form."""
    return plan.copies().get(plan.root, 0.0)


def plan_within(
    plan_id: PlanId, job: Job, seed: PeerFacts, peers: Sequence[PeerFacts], within_s: float
) -> Plan:
    """The plan with the fewest copies by the seed that is predicted to take at most `within_s`.

    If there is none, the fastest plan, as `plan_auto` makes it.
    """

    def fits(copies_max: float) -> Plan | None:
        plan = plan_at_most(plan_id, job, seed, peers, copies_max)
        return plan if plan is not None and plan.predicted_s <= within_s else None

    least = fits(1.0) if within_s > 0 else None
    if least is not None:
        return least
    fastest = plan_auto(plan_id, job, seed, peers)
    if fastest.predicted_s > within_s:
        return fastest
    step = COPIES_STEP if len(peers) <= SMALL_SWARM else 1.0
    # Bisect: `low` steps above one copy are too few, and `high` steps are enough; `found` is the
    # plan for `high`.
    found, low, high = fastest, 0, math.ceil(max(1.0, seed_copies(fastest) - 1.0) / step)
    while high - low > 1:
        middle = (low + high) // 2
        plan = fits(1.0 + middle * step)
        if plan is None:
            low = middle
        else:
            found, high = plan, middle
    return found


def is_worth_keeping(last: Plan, plan: Plan, within_s: float) -> bool:
    """Whether the trees of `last` send about as few copies as `plan`, and are fast enough.

    If `plan` itself is not fast enough, the trees of `last` need only be about as fast as `plan`. Then the spare
    share of the seed in `last` must be at least as large as in `plan`, because rates only predict.
    """
    takes_s = foretold_s(last, plan)
    if takes_s is None or takes_s > max(within_s, NEAR * plan.predicted_s):
        return False
    if takes_s > within_s and _spare(last) < _spare(plan):
        return False
    return seed_copies(last) <= NEAR * seed_copies(plan)


def _spare(plan: Plan) -> float:
    """The share of the bytes that the seed may send to every peer itself."""
    return sum(stripe.spare for stripe in plan.stripes)
