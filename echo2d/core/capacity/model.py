"""How much rollout throughput keeps the learner busy, what happens with less, and what to change where none is enough.

    symbol   unit                 means
    T        s                    `t_train_s`: a train step, net of waiting
    R, G     trajectories         `trajectories_per_step`, `group_size`
    kappa    train steps          `publish_every`, 1 to S + 1
    S        train steps          `staleness_max`
    B        s                    `t_bcast_s`: publish accepted until the last worker serves the version
    P        s                    `pause_s`: a refit, the time in which a worker generates nothing
    H        s                    `still_share` of B: where workers stop for a version, how long they do, each by its
                                  mu; all of B until it has been measured
    g        s                    `t_gen_s`: one trajectory, from its lease to its acceptance
    mu       trajectories / s     accepted, of all workers that are active

The problem: a learner costs as much as many workers, so it must not wait; a worker too many is money as well.

The rule. In a publish period the learner takes kappa * R trajectories and publishes once. Two things can make it wait:

- throughput. Workers generate all the time but for L: H where they stop for a broadcast ("exclusive", as in the paper),
  P where the download overlaps ("background"). A period takes kappa*R/mu + L and must not exceed kappa*T:
      mu >= kappa*R / (kappa*T - L)
  H <= B: a worker stops when it hears of a version, not when that is published, and until it serves it, not until the
  last one does. Where each stands still for H_i, kappa*R = sum mu_i * (period - H_i), so H = (sum mu_i * H_i) / mu.
- freshness. A version is used from B after it was published; the first batch that no older version may write for is
  trained on S + 1 - kappa steps after the publish. Until then a whole batch of it must be made:
      B + g + R/mu <= (S + 1 - kappa) * T,   which is   kappa*T + B + g + T_queue <= (S + 1)*T   with T_queue = R/mu
  Where that fails, admission makes workers wait rather than let data age. A publish that finds another one spreading
  waits for it: if B > kappa*T, 2 B takes the place of B.

mu_min is the larger of the two; provisioning aims at gamma * mu_min. With a smaller pool the period stretches:

    period = max( kappa*T,  kappa*R/mu + L,  kappa*T + max(0, B + g + R/mu - (S+1-kappa)*T) / floor((S+1)/kappa) )
    bubble = 1 - kappa*T / period

for the wait for freshness comes once a period, and floor((S+1)/kappa) such waits lie between a publish and the batch.

Worked example: T = 100 s, R = 256, S = 4, kappa = 3, B = H = 60 s. Exclusive: mu_min = 768 / (300 - 60) = 3.2/s; 0.9 of
that takes 266.7 + 60 = 326.7 s a period, a bubble of 8.2 %. Background, P = 5 s: 768 / 295 = 2.60/s. Freshness asks
for 256 / (200 - 60) = 1.83/s: it does not bind. With S = 1, kappa = 1 it does: 256 / (100 - 60) = 6.4/s.

The bound: no pool below R/T is enough, and kappa >= 2 L / T keeps the price of dissemination below a factor of 2.
Exact for liquid workers (a test plays them), but for one case: with exclusive broadcasts that take longer than the
batches made ahead last, S - kappa steps, too small a pool makes the learner wait up to 7 points more than `bubble`
says. Derived here, not quoted: the paper's text was not available. T is held fixed when R changes, though less work
makes it shorter: measure again.

Not here: what is measured (`estimators`), which workers (`activation`), what a broadcast takes (`topology/cost_model`).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

DisseminationMode = Literal["exclusive", "background"]

GAMMA = (
    1.1  # provisioned over needed: what noise in T_train and mu takes away (the paper's default)
)
STALENESS_TRIED_MAX = (
    64  # a larger S is never suggested: that is off-policy training by another name
)


@dataclass(frozen=True, slots=True)
class Demand:
    """What the learner asks of its workers; symbols as in the module docstring."""

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

    def __post_init__(self) -> None:
        assert 0 < self.t_train_s < math.inf
        assert min(self.t_bcast_s, self.pause_s, self.t_gen_s) >= 0
        assert 0 <= self.still_share <= 1
        assert self.trajectories_per_step > 0 < self.group_size
        assert 1 <= self.publish_every <= self.staleness_max + 1
        assert self.gamma >= 1

    @property
    def period_s(self) -> float:
        """Of two publishes, if the learner never waits."""
        return self.publish_every * self.t_train_s

    @property
    def lost_s(self) -> float:
        """L: in which workers generate nothing, for each publish; versions that are skipped cost no pause.

        Where one version comes after the other, those who stop for them always do.
        """
        if self.mode == "exclusive":
            return self.t_bcast_s * (1.0 if self.skips else self.still_share)
        return self.pause_s * (self.period_s / self.t_bcast_s if self.skips else 1.0)

    @property
    def skips(self) -> bool:
        """Whether versions are published faster than they spread: the newest one waits, older ones are dropped."""
        return self.t_bcast_s > self.period_s

    @property
    def delivery_s(self) -> float:
        """Publish until the version's first trajectories are there."""
        return (2 if self.skips else 1) * self.t_bcast_s + self.t_gen_s

    @property
    def grace_s(self) -> float:
        """Publish until the learner needs a batch that no older version may write for."""
        return (self.staleness_max + 1 - self.publish_every) * self.t_train_s


@dataclass(frozen=True, slots=True)
class Change:
    """A change that makes a demand feasible; `text` is for people: "S = 5", "T_bcast = 30 s"."""

    text: str
    demand: Demand


@dataclass(frozen=True, slots=True)
class Verdict:
    """mu_min, target: trajectories/s, None if no throughput is enough. reasons: why not, one sentence each."""

    mu_min: float | None
    target: float | None
    reasons: tuple[str, ...]
    changes: tuple[Change, ...]

    @property
    def feasible(self) -> bool:
        return not self.reasons

    @property
    def why_not(self) -> str:
        """Reasons and what would help, in one line; empty if feasible."""
        if self.feasible:
            return ""
        helps = " or ".join(change.text for change in self.changes)
        return f"{'; '.join(self.reasons)}: {f'{helps} would do' if helps else 'no single change would do'}"


def share_of_bcast(still_s: float | None, t_bcast_s: float) -> float:
    """`still_share` of a demand, for seconds that were measured; None: they were not."""
    return 1.0 if still_s is None or t_bcast_s <= 0 else min(1.0, still_s / t_bcast_s)


def mu_min(demand: Demand) -> float | None:
    """Trajectories/s with which the learner never waits; None if no throughput is enough."""
    making_s, waiting_s = demand.period_s - demand.lost_s, demand.grace_s - demand.delivery_s
    if making_s <= 0 or waiting_s <= 0:
        return None
    return demand.trajectories_per_step * max(demand.publish_every / making_s, 1 / waiting_s)


def bubble(demand: Demand, mu_pool: float) -> float:
    """The predicted share of its time that the learner waits for data."""
    return 1.0 - demand.period_s / period_s(demand, mu_pool)


def period_s(demand: Demand, mu_pool: float) -> float:
    """Seconds between two publishes with this throughput; infinite with none."""
    if mu_pool <= 0:
        return math.inf
    batch_s = demand.trajectories_per_step / mu_pool
    late_s = max(0.0, demand.delivery_s + batch_s - demand.grace_s)
    waits = (demand.staleness_max + 1) // demand.publish_every
    return max(demand.publish_every * batch_s + demand.lost_s, demand.period_s + late_s / waits)


def step_s(demand: Demand, mu_pool: float) -> float:
    """Seconds between two commits with this throughput, waiting included."""
    return period_s(demand, mu_pool) / demand.publish_every


def judge(demand: Demand, mu_available: float = math.inf) -> Verdict:
    """Whether workers of this throughput together are enough for gamma * mu_min, and if not, what to change."""
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
            f"data would be too old: it comes {demand.delivery_s:,.1f} s after a publish at the earliest, and is "
            f"needed S + 1 - kappa = {bound + 1 - kappa} train steps ({demand.grace_s:,.1f} s) after it"
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
    """Of each number the smallest change that is enough by itself; S may need another kappa with it."""
    for bound in range(demand.staleness_max + 1, STALENESS_TRIED_MAX + 1):
        longer = replace(demand, staleness_max=bound)
        if (kappa := _nearest_kappa(longer, mu_available)) is not None:
            with_kappa = "" if kappa == demand.publish_every else f" with kappa = {kappa}"
            yield Change(f"S = {bound}{with_kappa}", replace(longer, publish_every=kappa))
            break
    if (kappa := _nearest_kappa(demand, mu_available)) is not None:
        yield Change(f"kappa = {kappa}", replace(demand, publish_every=kappa))
    if (smaller := _smaller_step(demand, mu_available)) is not None:
        yield Change(f"R = {smaller.trajectories_per_step}", smaller)
    if (faster := _faster_broadcast(demand, mu_available)) is not None:
        yield Change(f"T_bcast = {faster.t_bcast_s:,.1f} s", faster)


def _nearest_kappa(demand: Demand, mu_available: float) -> int | None:
    """The smaller of two that are as near."""
    now = demand.publish_every
    tried = sorted(range(1, demand.staleness_max + 2), key=lambda kappa: (abs(kappa - now), kappa))
    return next(
        (kappa for kappa in tried if _feasible(replace(demand, publish_every=kappa), mu_available)),
        None,
    )


def _smaller_step(demand: Demand, mu_available: float) -> Demand | None:
    """The largest R of whole groups that these workers can make in time."""
    needed, size = mu_min(demand), demand.group_size
    if needed is None:
        return None
    share = mu_available / (demand.gamma * needed)
    groups = math.floor(demand.trajectories_per_step * share / size * (1 + 1e-12))
    return replace(demand, trajectories_per_step=groups * size) if groups else None


def _faster_broadcast(demand: Demand, mu_available: float) -> Demand | None:
    """The longest T_bcast, in 3 digits, with which it would do; found by halving, for shorter is no worse."""
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
