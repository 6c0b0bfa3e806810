"""Computes how much rollout throughput keeps the learner busy, and how long it waits with less.

Where no throughput is enough, it finds the smallest changes of the settings that would help.

    symbol   unit             means
    T        s                `t_train_s`: a train step, net of waiting
    R, G     trajectories     `trajectories_per_step`, `group_size`
    kappa    train steps      `publish_every`, 1 to S + 1
    S        train steps      `staleness_max`
    B        s                `t_bcast_s`: publish accepted until the last worker serves the version
    P        s                `pause_s`: a refit, in which a worker generates nothing
    W        s                `still_share` of B: how long workers stand still for a version in
                              exclusive mode, weighted by mu; all of B until it is measured
    C        s                `recompute_s`: computing the KV caches again that a refit dropped,
                              once the version is served
    H        s                `lost_s`: what a version costs a worker: W + C in exclusive mode,
                              P + C in background mode
    g        s                `t_gen_s`: a group, from its first lease until it is whole
    mu       trajectories/s   accepted, of all active workers together

docs/design/capacity.md derives the formulas, with an example and their limits.

Not here: what is measured (`estimators`), how long a step takes if the lengths of answers have a long tail
(`pipeline`), what pools cost (`pools`), which workers work (`activation`), how long a broadcast takes
(`topology/cost_model`).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from echo2d.core.rules.run import GAMMA, STALENESS_MAX, DisseminationMode


@dataclass(frozen=True, slots=True)
class Demand:
    """What the learner asks of its workers; the module docstring has the symbols."""

    t_train_s: float
    trajectories_per_step: int
    staleness_max: int
    publish_every: int
    t_bcast_s: float
    mode: DisseminationMode = "background"
    pause_s: float = 0.0
    t_gen_s: float = 0.0
    group_size: int = 1
    gamma: float = GAMMA
    still_share: float = 1.0
    recompute_s: float = 0.0
    # The next three are for `pipeline`. Lengths of samples divided by the usual length, group after group.
    lengths: tuple[float, ...] = ()
    # A group waits for its last samples this many times as long as the others took; 0: until it is too old.
    group_patience: float = 0.0
    # The share of the groups whose rewards are all equal.
    flat: float = 0.0

    def __post_init__(self) -> None:
        assert 0 < self.t_train_s < math.inf
        assert min(self.t_bcast_s, self.pause_s, self.t_gen_s, self.recompute_s) >= 0
        assert 0 <= self.still_share <= 1
        assert self.trajectories_per_step > 0 < self.group_size
        assert 1 <= self.publish_every <= self.staleness_max + 1
        assert self.gamma >= 1

    @property
    def period_s(self) -> float:
        """Seconds between two publishes if the learner never waits: kappa T."""
        return self.publish_every * self.t_train_s

    @property
    def lost_s(self) -> float:
        """H: seconds for each publish in which workers make nothing new.

        In background mode a skipped version costs nothing. In exclusive mode, if versions are
        skipped, one broadcast follows the other without a break, and workers stand still for all of B.
        """
        if self.mode == "exclusive":
            still_s = self.t_bcast_s * (1.0 if self.skips else self.still_share)
            return still_s + self.recompute_s
        return (self.pause_s + self.recompute_s) * self.loads

    @property
    def loads(self) -> float:
        """How many versions a worker loads for each publish."""
        return self.period_s / self.t_bcast_s if self.skips else 1.0

    @property
    def skips(self) -> bool:
        """Whether versions are published faster than they spread.

        Then the newest waiting version spreads next, and older waiting ones are dropped.
        """
        return self.t_bcast_s > self.period_s

    @property
    def delivery_s(self) -> float:
        """Seconds from a publish until the version's first trajectories are accepted."""
        # A publish that finds another version spreading waits for it first.
        # Once a worker serves a version, it first computes KV caches again.
        arrives_s = (2 if self.skips else 1) * self.t_bcast_s
        return arrives_s + self.recompute_s + self.t_gen_s

    @property
    def grace_s(self) -> float:
        """Seconds from a publish until a step may no longer use any older version."""
        return (self.staleness_max + 1 - self.publish_every) * self.t_train_s


@dataclass(frozen=True, slots=True)
class Change:
    """A change that makes a demand feasible."""

    # Its name, such as "S = 5" or "T_bcast = 30 s".
    text: str
    # The demand with this change.
    demand: Demand
    # What an operator writes into the config for it; empty: no key does it.
    todo: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a demand can be met, and if not, why."""

    # Trajectories/s; None if no throughput is enough.
    mu_min: float | None
    target: float | None
    # Why the demand cannot be met, one sentence each; empty if it can.
    reasons: tuple[str, ...]
    # Each of these changes alone would help.
    changes: tuple[Change, ...]

    @property
    def feasible(self) -> bool:
        return not self.reasons

    @property
    def why_not(self) -> str:
        """The reasons and the changes that would help, in one line; empty if feasible."""
        if self.feasible:
            return ""
        helps = " or ".join(change.text for change in self.changes) or "no single change"
        return f"{'; '.join(self.reasons)}: {helps} would do"


def share_of_bcast(still_s: float | None, t_bcast_s: float) -> float:
    """The `still_share` for measured seconds of standing still; 1.0 if they were not measured."""
    return 1.0 if still_s is None or t_bcast_s <= 0 else min(1.0, still_s / t_bcast_s)


def slack_s(demand: Demand) -> float:
    """The longest T_bcast that costs nothing: it needs no more throughput than a T_bcast of 0.

    0 in exclusive mode, because workers stand still for every second of a broadcast.
    """
    making_s = demand.period_s - demand.pause_s - demand.recompute_s
    if demand.mode == "exclusive" or making_s <= 0:
        return 0.0
    # Workers with the least throughput that is enough, R kappa / making_s, make a batch in this time.
    batch_s = making_s / demand.publish_every
    spare_s = demand.grace_s - demand.t_gen_s - demand.recompute_s - batch_s
    return max(0.0, min(demand.period_s, spare_s))


def mu_min(demand: Demand) -> float | None:
    """The trajectories/s at which the learner never waits; None if no throughput is enough."""
    making_s, waiting_s = demand.period_s - demand.lost_s, demand.grace_s - demand.delivery_s
    if making_s <= 0 or waiting_s <= 0:
        return None
    return demand.trajectories_per_step * max(demand.publish_every / making_s, 1 / waiting_s)


def publish_every_auto(demand: Demand) -> int:
    """The kappa to publish at: the smallest that needs hardly more throughput than the best one.

    With a larger kappa there are fewer refits, but the data is older: g and T_bcast must fit into the
    time that S leaves. If any kappa skips no version, such a kappa is chosen. The demand's own kappa
    does not matter.
    """
    tried = [replace(demand, publish_every=kappa) for kappa in range(1, demand.staleness_max + 2)]
    whole = [each for each in tried if each.period_s > each.t_bcast_s] or tried[-1:]
    needs = [(needed, each.publish_every) for each in whole if (needed := mu_min(each)) is not None]
    if not needs:
        return whole[0].publish_every
    # A larger kappa is taken only if it needs 5 % less throughput.
    enough = min(needs)[0] * 1.05
    return min(kappa for needed, kappa in needs if needed <= enough)


def bubble(demand: Demand, mu_pool: float) -> float:
    """The predicted share of its time for which the learner waits for data, 0 to 1."""
    return 1.0 - demand.period_s / period_s(demand, mu_pool)


def period_s(demand: Demand, mu_pool: float) -> float:
    """Seconds between two publishes with this throughput; infinite with none."""
    if mu_pool <= 0:
        return math.inf
    batch_s = demand.trajectories_per_step / mu_pool
    late_s = max(0.0, demand.delivery_s + batch_s - demand.grace_s)
    # The learner waits for fresh data once a period, so it waits this often between a publish and its batch.
    waits = (demand.staleness_max + 1) // demand.publish_every
    return max(demand.publish_every * batch_s + demand.lost_s, demand.period_s + late_s / waits)


def step_s(demand: Demand, mu_pool: float) -> float:
    """Seconds between two commits at this throughput, waiting included."""
    return period_s(demand, mu_pool) / demand.publish_every


def judge(demand: Demand, mu_available: float = math.inf) -> Verdict:
    """Whether workers with this total throughput meet gamma * mu_min; if not, what to change."""
    needed = mu_min(demand)
    reasons = tuple(_reasons(demand, mu_available))
    changes = tuple(_changes(demand, mu_available)) if reasons else ()
    return Verdict(needed, None if needed is None else demand.gamma * needed, reasons, changes)


def _feasible(demand: Demand, mu_available: float) -> bool:
    needed = mu_min(demand)
    return needed is not None and demand.gamma * needed <= mu_available


def _reasons(demand: Demand, mu_available: float) -> Iterator[str]:
    kappa, bound = demand.publish_every, demand.staleness_max
    if demand.period_s <= demand.lost_s:
        what = "a broadcast" if demand.mode == "exclusive" else "a refit"
        yield (
            f"{what} takes {demand.lost_s:,.1f} s, as long as kappa = {kappa} train steps "
            f"({demand.period_s:,.1f} s) or longer: workers would never generate"
        )
    if demand.grace_s <= demand.delivery_s:
        yield (
            f"data would be too old: it arrives {demand.delivery_s:,.1f} s after a publish at the "
            f"earliest, and is needed S + 1 - kappa = {bound + 1 - kappa} train steps "
            f"({demand.grace_s:,.1f} s) after it"
        )
    needed, least = mu_min(demand), demand.trajectories_per_step / demand.t_train_s
    together = (
        f"all workers together make {mu_available * 3600:,.0f} trajectories/h; the learner needs"
    )
    if needed is None and least > mu_available:
        yield f"{together} {least * 3600:,.0f} at the very least"
    elif needed is not None and demand.gamma * needed > mu_available:
        yield f"{together} {needed * 3600:,.0f}, with a margin {demand.gamma * needed * 3600:,.0f}"


def _changes(demand: Demand, mu_available: float) -> Iterator[Change]:
    """The smallest sufficient change of each setting; another S may need another kappa with it."""
    for bound in range(demand.staleness_max + 1, STALENESS_MAX + 1):
        longer = replace(demand, staleness_max=bound)
        if (kappa := _nearest_kappa(longer, mu_available)) is not None:
            with_kappa = "" if kappa == demand.publish_every else f" with kappa = {kappa}"
            todo = f"policy.staleness_max = {bound}"
            if with_kappa:
                todo += f" with policy.publish_every = {kappa}"
            yield Change(f"S = {bound}{with_kappa}", replace(longer, publish_every=kappa), todo)
            break
    if (kappa := _nearest_kappa(demand, mu_available)) is not None:
        todo = f"policy.publish_every = {kappa}"
        yield Change(f"kappa = {kappa}", replace(demand, publish_every=kappa), todo)
    if (smaller := _smaller_step(demand, mu_available)) is not None:
        todo = f"policy.trajectories_per_step = {smaller.trajectories_per_step}"
        yield Change(f"R = {smaller.trajectories_per_step}", smaller, todo)
    if (faster := _faster_broadcast(demand, mu_available)) is not None:
        yield Change(f"T_bcast = {faster.t_bcast_s:,.1f} s", faster)


def _nearest_kappa(demand: Demand, mu_available: float) -> int | None:
    """The feasible kappa nearest to the present one, the smaller of two; None if there is none."""
    now = demand.publish_every
    tried = sorted(range(1, demand.staleness_max + 2), key=lambda kappa: (abs(kappa - now), kappa))
    return next(
        (kappa for kappa in tried if _feasible(replace(demand, publish_every=kappa), mu_available)),
        None,
    )


def _smaller_step(demand: Demand, mu_available: float) -> Demand | None:
    """The demand with the largest R, in whole groups, that these workers can make in time.

    T is held fixed, although less work makes a train step shorter.
    """
    needed, size = mu_min(demand), demand.group_size
    if needed is None:
        return None
    share = mu_available / (demand.gamma * needed)
    groups = math.floor(demand.trajectories_per_step * share / size * (1 + 1e-12))
    return replace(demand, trajectories_per_step=groups * size) if groups else None


def _faster_broadcast(demand: Demand, mu_available: float) -> Demand | None:
    """The demand with the longest feasible T_bcast, rounded down to 3 digits.

    Bisection finds it, because a shorter broadcast is never worse.
    """
    low, high = 0.0, demand.t_bcast_s
    if not _feasible(replace(demand, t_bcast_s=low), mu_available):
        return None
    while high - low > 1e-6 * demand.t_bcast_s:
        middle = (low + high) / 2
        if _feasible(replace(demand, t_bcast_s=middle), mu_available):
            low = middle
        else:
            high = middle
    return replace(demand, t_bcast_s=_rounded_down(low))


def _rounded_down(seconds: float) -> float:
    if seconds <= 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(seconds)) - 2)
    return math.floor(seconds / unit) * unit
