"""Makes a plan of the shape that the operator chose by name in `registry.SHAPES`.

Every planner is imported together with this module, so that no decision of the core waits for an
import.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from echo2d.core.base.ids import PlanId
from echo2d.core.topology.few_copies import plan_within
from echo2d.core.topology.plan import Job, PeerFacts, Plan
from echo2d.registry import SHAPES, load


class Planner(Protocol):
    """Plans one broadcast of `job` from the seed to all peers.

    The seed can be dialled. chains: the operator's `dissemination.chains`, 1 to STRIPES_MAX; most
    shapes ignore it. The plan has generation 0 and passes `Plan.check`. The status shows the plan's
    `shape`, which may differ from the name under which the planner is registered.
    """

    def __call__(
        self, plan_id: PlanId, job: Job, seed: PeerFacts, peers: Sequence[PeerFacts], chains: int, /
    ) -> Plan: ...


# The shape for which the planner chooses the trees.
AUTO = "auto"
PLANNERS: Mapping[str, Planner] = {name: load(entry) for name, entry in SHAPES.items()}


def plan_shape(
    shape: str,
    plan_id: PlanId,
    job: Job,
    seed: PeerFacts,
    peers: Sequence[PeerFacts],
    *,
    chains: int = 1,
    within_s: float | None = None,
) -> Plan:
    """A plan of this shape, a name in `registry.SHAPES`.

    within_s: with the shape "auto", the plan with the fewest copies from the seed among those that take at most
    this long; None: the seed's bytes cost nothing. Other shapes ignore within_s.
    """
    if shape == AUTO and within_s is not None:
        return plan_within(plan_id, job, seed, peers, within_s)
    return PLANNERS[shape](plan_id, job, seed, peers, chains)
