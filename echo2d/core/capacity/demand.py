"""Plans capacity: computes from measurements and workers what pools cost, how much throughput is short, and which
workers to activate.

    measurements --+--> demand: mu_min         (`model`)        --+--> pools: the cheapest (`pools`) --+--> activate,
                   |                                              |                                    |    deactivate
    workers -------+--> offers: mu_i, usd/h    (`worker_cost`)  --+                                    +--> shortfall

mu counts only trajectories that are trained on: each worker's mu is reduced by the share that the run
throws away (too old, filtered, failed). The coordinator's activation loop, the simulation of a
fleet and `plan` price pools in the same way. Until T_train and T_bcast are measured or assumed, all
workers work, because none is known to be superfluous.
Not here: what is sent to workers, and prices by name (`prices`).
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from blake3 import blake3

from echo2d.core.base.ids import PeerId
from echo2d.core.capacity.activation import NOT_MEASURED, Activation, ActivationRules, Decision
from echo2d.core.capacity.bottleneck import BUSY
from echo2d.core.capacity.estimators import Estimate
from echo2d.core.capacity.measurements import LATE_MAX, Measurements
from echo2d.core.capacity.model import (
    Demand,
    Verdict,
    judge,
    publish_every_auto,
    share_of_bcast,
    slack_s,
)
from echo2d.core.capacity.pipeline import group_times, lengths_of
from echo2d.core.capacity.pools import Pools
from echo2d.core.capacity.worker_cost import WorkerOffer, bandwidth_usd_per_h, by_rho
from echo2d.core.rules.prices import Price
from echo2d.core.rules.run import RunRules

# The run never asks for more than this many times R / T, which is what the learner takes.
NEED_MAX = 5.0
# A broadcast may be predicted to take this part of the slack, so that it still costs nothing if it
# takes twice as long.
SLACK_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Assumptions:
    """Values that hold until they are measured; None: unknown."""

    t_train_s: float | None = None
    t_bcast_s: float | None = None
    pause_s: float = 0.0
    t_gen_s: float = 0.0
    recompute_s: float = 0.0
    # Until lengths are measured, the spread of their logarithms is assumed to be 0.5.
    lengths: tuple[float, ...] = lengths_of(0.5)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that is here and serves a version."""

    name: str
    # Trajectories/s that it makes, including those that are thrown away.
    mu: float
    price: Price
    # How often it sends a version to other workers.
    copies_sent: float = 0.0
    # It announced that it leaves.
    leaving: bool = False
    # Whether mu is still a guess.
    guessed: bool = False
    slots: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityBalance:
    """What is needed and what there is, in trajectories/s."""

    # The throughput of the active workers.
    mu_pool: float
    mu_min: float | None
    # The throughput of the cheapest pool.
    mu_target: float | None
    # The throughput of all workers that are here.
    mu_available: float
    bubble_predicted: float | None
    # Whether all workers together keep the learner busy.
    feasible: bool | None
    # Why all workers together do not keep the learner busy, and what would help; empty if they do.
    why_not: str
    # Why the cheapest pool is the cheapest.
    why: str
    verdict: Verdict


@dataclass(slots=True)
class CapacityPlanner:
    """See the module docstring. `now` is monotonic seconds; kappa is the present one."""

    rules: RunRules
    measurements: Measurements
    # The values that hold until they are measured.
    said: Assumptions = field(default_factory=Assumptions)
    activation: Activation = field(default_factory=Activation)
    # Whether the owner calls `play` for one pool after the other, so that its other work never waits for long.
    sliced: bool = False
    # Where prices do not decide in which order workers are taken, this seed and the workers' names do.
    order_seed: int = 0
    # The pools of the last review.
    pools: Pools | None = None
    # The pools that are being priced.
    _next: Pools | None = None
    # A group takes `_tail` times as long as a sample, with these lengths.
    _lengths: tuple[float, ...] = ()
    _tail: float = 1.0

    def demand(self, kappa: int) -> Demand | None:
        """The learner's demand, as measured or else assumed; None: a value is neither measured nor assumed.

        Its g is the time of a whole group.
        """
        rules, said, measurements = self.rules, self.said, self.measurements
        t_train_s = _value(measurements.t_train.estimate, said.t_train_s)
        t_bcast_s = _value(measurements.t_bcast.estimate, said.t_bcast_s)
        if not t_train_s or t_bcast_s is None:
            return None
        lengths = measurements.lengths.newest or said.lengths
        if lengths is not self._lengths:
            self._lengths = lengths
            self._tail = group_times(lengths, rules.group_size, rules.group_patience)
        return Demand(
            t_train_s,
            rules.trajectories_per_step,
            rules.staleness_max,
            kappa,
            t_bcast_s,
            rules.dissemination.mode,
            _value(measurements.pause.estimate, said.pause_s) or 0.0,
            self._tail * (_value(measurements.t_gen.estimate, said.t_gen_s) or 0.0),
            rules.group_size,
            rules.activation.gamma,
            share_of_bcast(_value(measurements.still.estimate, None), t_bcast_s),
            _value(measurements.recompute.estimate, said.recompute_s) or 0.0,
            lengths,
            rules.group_patience,
        )

    def publish_every(self) -> int:
        """kappa as the rules name it; with "auto" it follows from measurements, and is 1 until there are some."""
        if self.rules.publish_every != "auto":
            return self.rules.publish_every
        demand = self.demand(1)
        return 1 if demand is None else publish_every_auto(demand)

    def spread_s(self, kappa: int, waited_s: float = 0.0) -> float:
        """Seconds that a version may spread without costing anything; see `spread_s` below.

        waited_s: seconds since its publish. Returns 0 if there is no time to spare, or if that is not known.
        """
        demand = self.demand(kappa)
        if demand is None:
            return 0.0
        # A broadcast by a guessed plan is never late, but the time that it took counts.
        took_s = list(self.measurements.t_bcast.samples)[-LATE_MAX:]
        if max(took_s, default=demand.t_bcast_s) > slack_s(demand):
            return 0.0
        late_s = max(self.measurements.late_s, default=demand.pause_s)
        return spread_s(demand, waited_s + late_s)

    def offers(self, candidates: Iterable[Candidate], period_s: float | None) -> list[WorkerOffer]:
        """The candidates as offers, in the order in which they are taken without `by_cost`.

        period_s: between two publishes; None: traffic is assumed to cost nothing.
        """
        wire, yields = self.measurements.wire_bytes.estimate, self.measurements.yields
        publishes_per_h, wire_bytes = (
            3600.0 / period_s if period_s else 0.0,
            0.0 if wire is None else wire.value,
        )
        found = [
            _offer(each, publishes_per_h, wire_bytes, yields.of(PeerId(each.name)))
            for each in candidates
        ]
        return found if self.rules.activation.by_cost else sorted(found, key=self._drawn)

    def review(
        self, candidates: Collection[Candidate], kappa: int, waited_s: float = 0.0, *, now: float
    ) -> Decision:
        """Which workers to activate and deactivate now; see `Activation.decide`.

        waited_s: the seconds that the learner has waited for rollouts since the run began.
        """
        demand = self.demand(kappa)
        offers = self.offers(candidates, None if demand is None else demand.period_s)
        leaving = {each.name for each in candidates if each.leaving}
        rules = ActivationRules(review_s=0.0, by_cost=self.rules.activation.by_cost)
        if demand is not None:
            # An activated worker stays active for at least two publish periods.
            rules = ActivationRules(
                review_s=self._period_s(demand),
                cool_down_s=demand.t_bcast_s + demand.pause_s + demand.recompute_s,
                hold_s=2 * self._period_s(demand),
                by_cost=self.rules.activation.by_cost,
            )
            if self.pools is None or self.activation.reviews(now):
                self.price(candidates, kappa)
        return self.activation.decide(
            rules, offers, self.pools, now=now, leaving=leaving, waited_s=waited_s
        )

    def price(self, candidates: Iterable[Candidate], kappa: int) -> None:
        """Price the pools of the workers that stay."""
        demand = self.demand(kappa)
        staying = [each for each in candidates if not each.leaving]
        if demand is None or not staying or self._next is not None:
            return
        self._next = self._priced(demand, self.offers(staying, demand.period_s))
        while not self.sliced and self.play():
            pass

    def play(self) -> bool:
        """Play one of the pools that are being priced; with the last one they become `pools`. Returns whether more are
        left.
        """
        if self._next is None or self._next.play():
            return self._next is not None
        self.pools, self._next = self._next, None
        return False

    @property
    def plays(self) -> bool:
        """Whether pools are being priced."""
        return self._next is not None

    def shortfall(self, candidates: Iterable[Candidate], kappa: int) -> float | None:
        """Trajectories/s by which all workers here, active or not, miss the cheapest pool.

        Negative: they make more. None: it is not known. Boxes are rented by this figure, and workers influence it by
        what they report (durations, failures). So it has a limit that only the learner influences: it is never above 0
        once the workers make NEED_MAX times R / T.
        """
        demand = self.demand(kappa)
        if demand is None or self.pools is None:
            return None
        staying = [one for one in candidates if not one.leaving]
        here = sum(offer.mu for offer in self.offers(staying, None))
        most = NEED_MAX * self.rules.trajectories_per_step / demand.t_train_s
        return min(self.pools.best.mu - here, most - sum(one.mu for one in staying))

    def balance(
        self, offers: Sequence[WorkerOffer], active: Collection[str], kappa: int
    ) -> CapacityBalance:
        """The balance of the workers that are here, counting all of each worker's mu, as decisions do."""
        demand, pools = self.demand(kappa), self.pools
        mu_pool = sum(offer.mu for offer in offers if offer.name in active)
        available = sum(offer.mu for offer in offers)
        verdict = Verdict(None, None, (), ()) if demand is None else judge(demand, available)
        busy = pools is not None and pools.bubble(available) <= BUSY
        return CapacityBalance(
            mu_pool=mu_pool,
            mu_min=verdict.mu_min,
            mu_target=None if pools is None else pools.best.mu,
            mu_available=available,
            bubble_predicted=None if pools is None else pools.bubble(mu_pool),
            feasible=None if demand is None else busy or verdict.feasible,
            why_not="" if busy else verdict.why_not,
            why=NOT_MEASURED if pools is None else pools.why(),
            verdict=verdict,
        )

    # --- inside

    def _priced(self, demand: Demand, offers: Sequence[WorkerOffer]) -> Pools:
        """Pools of these workers, and of further ones like the most expensive of them.

        A worker whose rate is still a guess counts for no more than the fastest one that was measured.
        """
        if shown := [each.mu for each in offers if not each.guessed]:
            offers = [
                replace(each, mu=min(each.mu, max(shown))) if each.guessed else each
                for each in offers
            ]
        ranked = (
            by_rho(offers)
            if self.rules.activation.by_cost
            else [each for each in offers if each.mu > 0]
        )
        ranked += more_like_the_last(
            ranked, NEED_MAX * demand.trajectories_per_step / demand.t_train_s
        )
        made = sum(each.mu / (1.0 - each.waste) for each in ranked if each.waste < 1.0)
        demand = replace(demand, flat=1.0 - sum(each.mu for each in ranked) / made if made else 0.0)
        times = None if self.pools is None else self.pools.times
        if times is not None and not times.holds_for(demand, ranked):
            times = None
        slower = self.activation.raised.factor
        return Pools(demand, ranked, self.rules.activation.learner_usd_per_h, times, slower=slower)

    def _period_s(self, demand: Demand) -> float:
        """Seconds between two publishes, including the learner's waiting with the cheapest pool."""
        step_s = (
            0.0 if self.pools is None or not self.pools.best.workers else self.pools.best.step_s
        )
        return demand.publish_every * max(demand.t_train_s, step_s)

    def _drawn(self, offer: WorkerOffer) -> bytes:
        """A sort key that depends on this worker alone, not on which others are here."""
        return blake3(f"{self.order_seed} {offer.name}".encode()).digest(8)


def spread_s(demand: Demand, other_s: float) -> float:
    """The longest time that a plan may predict for a version so that its T_bcast costs nothing.

    other_s: the rest of T_bcast: waiting, encoding, the refit, and the error of predictions.
    0: there is no time to spare.
    """
    return max(0.0, SLACK_SHARE * slack_s(demand) - other_s)


def _offer(each: Candidate, publishes_per_h: float, wire_bytes: float, used: float) -> WorkerOffer:
    """used: the worker's yield, the share of what it makes that is trained on."""
    price = each.price
    traffic = bandwidth_usd_per_h(
        publishes_per_h=publishes_per_h,
        wire_bytes=wire_bytes,
        copies_sent=each.copies_sent,
        usd_per_gb_down=price.usd_per_gb_down,
        usd_per_gb_up=price.usd_per_gb_up,
    )
    return WorkerOffer(
        each.name, each.mu * used, price.usd_per_h + traffic, each.guessed, each.slots, 1.0 - used
    )


def more_like_the_last(ranked: Sequence[WorkerOffer], most: float) -> list[WorkerOffer]:
    """Imagined further workers like the last of these, the most expensive one, up to `most` trajectories/s in all."""
    lacks = most - sum(each.mu for each in ranked)
    if not ranked or lacks <= 0:
        return []
    last = ranked[-1]
    # At most 64 imagined workers are priced beside those that are here.
    count = min(64, int(lacks / last.mu) + 1)
    return [replace(last, name=f"{last.name} {number}") for number in range(count)]


def _value(measured: Estimate | None, said: float | None) -> float | None:
    return said if measured is None else measured.value
