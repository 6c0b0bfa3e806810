"""Names the bottleneck of a run, in one sentence with the numbers behind it.

    learner         the learner hardly ever waits: as it should be
    reward          most of the waiting is for groups that lack nothing but their rewards
    dissemination   the active workers would be enough if versions arrived and loaded in no time
    rollout         the active workers are too few, or too slow

If generation and broadcasts both take longer than S allows, the one that takes longer is named. This
module reads estimates and counts, and decides nothing.
"""

from dataclasses import dataclass, replace
from typing import Literal, get_args

from echo2d.core.base.described import described
from echo2d.core.capacity.model import Demand, Verdict, mu_min

# The bubble is measured over this many newest train steps.
BUBBLE_STEPS = 16
# A bubble up to this share of the learner's time counts as none.
BUSY = 0.02

BottleneckKind = Literal["unknown", "learner", "reward", "dissemination", "rollout"]
BOTTLENECK_KINDS: tuple[BottleneckKind, ...] = get_args(BottleneckKind)


@dataclass(frozen=True, slots=True)
class Situation:
    """The figures from which the bottleneck is named."""

    # The measured bubble; None before the second step.
    bubble: float | None
    demand: Demand | None
    # Trajectories/s of the active workers.
    mu_pool: float
    # Numbers of workers.
    active: int
    standby: int
    # The share of the waiting in which groups that lacked only rewards would have filled the batch.
    rewards: float
    # Groups that lack only rewards now.
    unscored: int
    # Groups that the batch lacks now.
    missing: int
    # Whether all workers that are here would be enough, as on the capacity card.
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """What the run waits for."""

    kind: BottleneckKind = described("one of the kinds of docs/guide/operating.md")
    text: str = described("one sentence with the numbers behind it")


def bottleneck(now: Situation) -> Bottleneck:
    kind = _kind(now)
    return Bottleneck(kind, _TEXT[kind](now))


def _kind(now: Situation) -> BottleneckKind:
    if now.bubble is None:
        return "unknown"
    if now.bubble <= BUSY:
        return "learner"
    # The learner waits for rewards for most of its waiting time.
    if now.rewards > 0.5:
        return "reward"
    if now.demand is None:
        return "rollout"
    return "dissemination" if _for_versions(now.demand, now.mu_pool) else "rollout"


def _for_versions(demand: Demand, mu_pool: float) -> bool:
    """Whether the learner waits for versions to spread rather than for workers to generate."""
    needed, at_once = (
        mu_min(demand),
        mu_min(replace(demand, t_bcast_s=0.0, pause_s=0.0, recompute_s=0.0)),
    )
    if at_once is None:
        return demand.delivery_s - demand.t_gen_s > demand.t_gen_s
    return mu_pool >= at_once and (needed is None or mu_pool < needed)


def _unknown(_: Situation) -> str:
    return "not known yet: the learner has not done two train steps in this session"


def _learner(now: Situation) -> str:
    return f"learner-bound, as it should be: it waits {_share(now)} of its time; {_pool(now)}"


def _reward(now: Situation) -> str:
    return (
        f"reward-bound: the learner waits {_share(now)} of its time, "
        f"{now.rewards:.0%} of that for rewards alone; "
        f"now {now.unscored} groups lack only rewards, "
        f"the batch lacks {now.missing} (more task.processes?)"
    )


def _dissemination(now: Situation) -> str:
    demand = now.demand
    assert demand is not None
    return (
        f"dissemination-bound: the learner waits {_share(now)} of its time; "
        f"a broadcast takes {demand.t_bcast_s:.3g} s, a refit {demand.pause_s:.3g} s, "
        f"kappa = {demand.publish_every} train steps {demand.period_s:.3g} s, "
        f"S = {demand.staleness_max}; {_pool(now)}"
    )


def _rollout(now: Situation) -> str:
    enough = now.demand is not None and (mu_min(now.demand) or float("inf")) <= now.mu_pool
    passes = " (enough by now, unless they come in bursts)" if enough else ""
    standby = f"{now.standby} {'worker stands' if now.standby == 1 else 'workers stand'} by"
    return (
        f"rollout-bound: the learner waits {_share(now)} of its time; "
        f"{_pool(now)}{passes}; {standby}"
    )


def _share(now: Situation) -> str:
    return "-" if now.bubble is None else f"{now.bubble:.1%}"


def _pool(now: Situation) -> str:
    workers = "1 worker makes" if now.active == 1 else f"{now.active} workers make"
    made = f"{workers} {_per_h(now.mu_pool)} trajectories/h"
    if now.demand is None:
        return f"{made}, what the learner needs is not measured yet"
    needed = mu_min(now.demand)
    if needed is None:
        todos = " or ".join(change.todo for change in now.verdict.changes if change.todo)
        words = f"{made}, no number would be enough ({now.verdict.why_not})"
        return f"{words}; do: {todos}" if todos else f"{words}{_times(now)}"
    return f"{made}, the learner needs {_per_h(needed)}{_times(now)}"


def _times(now: Situation) -> str:
    """How many times as many workers the learner needs at least, if it needs at least twice as many."""
    demand = now.demand
    if demand is None or now.mu_pool <= 0:
        return ""
    times = demand.trajectories_per_step / demand.t_train_s / now.mu_pool
    # The factor is named from 2 on.
    return f": about {times:.0f} times as many workers" if times >= 2.0 else ""


def _per_h(mu: float) -> str:
    return f"{3600.0 * mu:,.0f}"


_TEXT = {
    "unknown": _unknown,
    "learner": _learner,
    "reward": _reward,
    "dissemination": _dissemination,
    "rollout": _rollout,
}
