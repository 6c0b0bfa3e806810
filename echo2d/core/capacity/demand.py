"""Plans capacity: from the measurements and the workers to what pools cost, what is short, and a decision of
`activation`.

    measurements --+--> demand: mu_min         (`model`)        --+--> pools: the cheapest (`pools`) --+--> activate,
                   |                                              |                                    |    deactivate
    workers -------+--> offers: mu_i, usd/h    (`worker_cost`)  --+                                    +--> shortfall

mu counts trajectories that are trained on: each worker's is reduced by the share that the run
throws away (too old, filtered, failed). The coordinator's activation loop, the simulation of a
fleet and `plan` price pools alike. Until T_train and T_bcast are measured or assumed, no worker is known
to be too much, so all work. Not here: how workers are told, and prices by name (`prices`).
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

# Times what the learner takes, R / T: more is never asked for.
NEED_MAX = 5.0
# The part of the slack that a broadcast may take, so that one that takes twice as long as predicted
# still costs nothing.
SLACK_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Assumptions:
    """Values that hold until they are measured; None: unknown."""

    t_train_s: float | None = None
    t_bcast_s: float | None = None
    pause_s: float = 0.0
    t_gen_s: float = 0.0
    recompute_s: float = 0.0
    # Until lengths are measured, the spread of their logarithm is 0.5.
    lengths: tuple[float, ...] = lengths_of(0.5)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that is here and serves a version.

    mu: trajectories/s that it makes, including those that are thrown away. copies_sent: how often
    it sends a version to other workers. leaving: it announced that it leaves. guessed: see
    `WorkerOffer`.
    """

    name: str
    mu: float
    price: Price
    copies_sent: float = 0.0
    leaving: bool = False
    guessed: bool = False
    slots: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityBalance:
    """What is needed and what there is, in trajectories/s.

    mu_pool: of the active workers. mu_available: of all that are here. mu_target: of the cheapest pool. feasible:
    whether all workers together keep the learner busy, and if not, why_not. why: why the cheapest pool is that.
    """

    mu_pool: float
    mu_min: float | None
    mu_target: float | None
    mu_available: float
    bubble_predicted: float | None
    feasible: bool | None
    why_not: str
    why: str
    verdict: Verdict


@dataclass(slots=True)
class CapacityPlanner:
    """See the module docstring. `now` is monotonic seconds; kappa is the present one.

    said: assumed until it is measured. pools: of the last review. sliced: whoever owns this plays one pool after the
    other (`play`), so that nothing else waits for long. order_seed: decides, with names, in which order workers are
    taken where their price does not.
    """

    rules: RunRules
    measurements: Measurements
    said: Assumptions = field(default_factory=Assumptions)
    activation: Activation = field(default_factory=Activation)
    sliced: bool = False
    order_seed: int = 0
    pools: Pools | None = None
    _next: Pools | None = None
    # The lengths of which `_tail` is the factor from a sample's time to its group's.
    _lengths: tuple[float, ...] = ()
    _tail: float = 1.0

    def demand(self, kappa: int) -> Demand | None:
        """The learner's demand, as measured or else assumed; None where neither is known.

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
        """kappa: the one that the rules name; with "auto" what follows from measurements, 1 until they are there."""
        if self.rules.publish_every != "auto":
            return self.rules.publish_every
        demand = self.demand(1)
        return 1 if demand is None else publish_every_auto(demand)

    def spread_s(self, kappa: int, waited_s: float = 0.0) -> float:
        """Seconds that a version may spread without costing anything; see `spread_s` below.

        waited_s: since it was published. 0: there is no time to spare, or it is not known.
        """
        demand = self.demand(kappa)
        if demand is None:
            return 0.0
        # Plans that are guesses are never late, but what they took counts.
        took_s = list(self.measurements.t_bcast.samples)[-LATE_MAX:]
        if max(took_s, default=demand.t_bcast_s) > slack_s(demand):
            return 0.0
        late_s = max(self.measurements.late_s, default=demand.pause_s)
        return spread_s(demand, waited_s + late_s)

    def offers(self, candidates: Iterable[Candidate], period_s: float | None) -> list[WorkerOffer]:
        """The candidates as offers, in the order that counts without `by_cost`.

        period_s: between two publishes; None: traffic is taken to cost nothing.
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

        waited_s: for how long the learner has waited for rollouts since the run began.
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
        """Price the pools of those that stay."""
        demand = self.demand(kappa)
        staying = [each for each in candidates if not each.leaving]
        if demand is None or not staying or self._next is not None:
            return
        self._next = self._priced(demand, self.offers(staying, demand.period_s))
        while not self.sliced and self.play():
            pass

    def play(self) -> bool:
        """Whether there is more to play before the pools that are being priced take the place of the others."""
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

        Negative: they make more. None: it is not known. Boxes are rented for it, and workers influence it
        by what they report (durations, failures). So nothing is short once they make NEED_MAX times R / T, which only
        the learner reports.
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
        """Of the workers that are here, each with all of its mu, as decisions count it."""
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
        """Pools of these workers, and of more like the dearest of them.

        Whose own work has shown nothing yet counts for no more than one that has shown most.
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
        """Seconds between two publishes, with the waiting that the cheapest pool makes."""
        step_s = (
            0.0 if self.pools is None or not self.pools.best.workers else self.pools.best.step_s
        )
        return demand.publish_every * max(demand.t_train_s, step_s)

    def _drawn(self, offer: WorkerOffer) -> bytes:
        """A sort key that depends on this worker alone, not on which others are here."""
        return blake3(f"{self.order_seed} {offer.name}".encode()).digest(8)


def spread_s(demand: Demand, other_s: float) -> float:
    """Seconds that a version may spread, by prediction, such that its T_bcast costs nothing.

    other_s: the rest of T_bcast: waiting, encoding, the refit, and what predictions were wrong by.
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
    """Workers that might be had besides these, up to so many trajectories/s in all: like the dearest."""
    lacks = most - sum(each.mu for each in ranked)
    if not ranked or lacks <= 0:
        return []
    last = ranked[-1]
    # At most 64 more workers are asked about: would they be worth their price?
    count = min(64, int(lacks / last.mu) + 1)
    return [replace(last, name=f"{last.name} {number}") for number in range(count)]


def _value(measured: Estimate | None, said: float | None) -> float | None:
    return said if measured is None else measured.value
