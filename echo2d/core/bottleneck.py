"""What a run waits for at present, in one sentence with the numbers behind it.

    learner         it waits for hardly anything: as it should be
    reward          whole groups that lack nothing but rewards would fill its batch
    dissemination   with broadcasts that take no time the workers that work would be enough
    rollout         they are too few, or too slow

Reads estimates (`provisioning`) and counts, decides nothing.
"""

from dataclasses import dataclass, replace
from typing import Literal, get_args

from echo2d.core.capacity import Demand, mu_min

BUBBLE_STEPS = 16  # train steps that are "at present"
BUSY = 0.02  # of the learner's time: a smaller bubble is none

Kind = Literal["unknown", "learner", "reward", "dissemination", "rollout"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Situation:
    """bubble: measured, None before the second step. mu_pool: trajectories/s. active, standby: workers.

    unscored: groups that lack only rewards; missing: groups that the batch still lacks; waits: the learner, for that.
    """

    bubble: float | None
    demand: Demand | None
    mu_pool: float
    active: int
    standby: int
    unscored: int
    missing: int
    waits: bool


def bottleneck(now: Situation) -> dict[str, str]:
    """`kind` and `text`."""
    kind = _kind(now)
    return {"kind": kind, "text": _TEXT[kind](now)}


def _kind(now: Situation) -> Kind:
    if now.bubble is None:
        return "unknown"
    if now.bubble <= BUSY:
        return "learner"
    if now.waits and now.unscored >= max(1, now.missing):
        return "reward"
    if now.demand is None:
        return "rollout"
    at_once = mu_min(replace(now.demand, t_bcast_s=0.0))
    needed = mu_min(now.demand)
    if at_once is not None and now.mu_pool >= at_once and (needed is None or now.mu_pool < needed):
        return "dissemination"
    return "rollout"


def _unknown(_: Situation) -> str:
    return "not known yet: the learner has not done two train steps in this session"


def _learner(now: Situation) -> str:
    return f"learner-bound, as it should be: it waits {_share(now)} of its time; {_pool(now)}"


def _reward(now: Situation) -> str:
    return (
        f"reward-bound: the learner waits {_share(now)} of its time; {now.unscored} groups lack only rewards, "
        f"the batch lacks {now.missing} (more task.processes?)"
    )


def _dissemination(now: Situation) -> str:
    demand = now.demand
    assert demand is not None
    return (
        f"dissemination-bound: the learner waits {_share(now)} of its time; a broadcast takes {demand.t_bcast_s:.3g} "
        f"s, kappa = {demand.publish_every} train steps {demand.period_s:.3g} s, S = {demand.staleness_max}; "
        f"{_pool(now)}"
    )


def _rollout(now: Situation) -> str:
    return f"rollout-bound: the learner waits {_share(now)} of its time; {_pool(now)}; {now.standby} workers stand by"


def _share(now: Situation) -> str:
    return "-" if now.bubble is None else f"{now.bubble:.1%}"


def _pool(now: Situation) -> str:
    made = f"{now.active} workers make {_per_h(now.mu_pool)} trajectories/h"
    needed = None if now.demand is None else mu_min(now.demand)
    if now.demand is None:
        return f"{made}, what it needs is not measured yet"
    return f"{made}, {'no number would be enough' if needed is None else f'it needs {_per_h(needed)}'}"


def _per_h(mu: float) -> str:
    return f"{3600.0 * mu:,.0f}"


_TEXT = {
    "unknown": _unknown,
    "learner": _learner,
    "reward": _reward,
    "dissemination": _dissemination,
    "rollout": _rollout,
}
