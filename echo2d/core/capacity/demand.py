"""Plans capacity: from the measurements and the workers to the throughput that is needed, what is
short of it, and a decision of `activation`.

    measurements --+--> demand: mu_min         (`model`)        --+--> activate, deactivate
                   |                                              |    (`activation`)
    workers -------+--> offers: mu_i, usd/h    (`worker_cost`)  --+--> shortfall

mu counts trajectories that are trained on: each worker's is reduced by the share that the run
throws away (too old, filtered, failed). The coordinator's activation loop and the simulation of a
fleet both use this planner. Until T_train and T_bcast are measured or assumed, no worker is known
to be too much, so all work. Where no throughput keeps data fresh enough, as many work as the
learner can use. Not here: how workers are told, and prices by name (`prices`).
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from blake3 import blake3

from echo2d.core.base.ids import PeerId
from echo2d.core.capacity.activation import NOT_MEASURED, Activation, ActivationRules, Decision
from echo2d.core.capacity.estimators import Estimate
from echo2d.core.capacity.measurements import LATE_MAX, Measurements
from echo2d.core.capacity.model import (
    GAMMA,
    Demand,
    DisseminationMode,
    Verdict,
    bubble,
    judge,
    mu_min,
    publish_every_auto,
    share_of_bcast,
    slack_s,
    usable,
)
from echo2d.core.capacity.prices import Price
from echo2d.core.capacity.worker_cost import WorkerOffer, bandwidth_usd_per_h

NOT_FRESH = "no throughput keeps data fresh enough: as many work as the learner can use"
# Times what the learner takes, R / T: filtered groups make a step need 4 R more at most.
NEED_MAX = 5.0
# The part of the slack that a broadcast may take, so that one that takes twice as long as predicted
# still costs nothing.
SLACK_SHARE = 0.5
# Publish periods that an activated worker stays active at least.
HOLD_PERIODS = 2


@dataclass(frozen=True, slots=True)
class CapacityRules:
    """by_cost: cheapest workers first; otherwise in an order that names and `rng_seed` decide.
    learner_usd_per_h: 0: not known.
    """

    trajectories_per_step: int
    staleness_max: int
    group_size: int
    mode: DisseminationMode = "background"
    gamma: float = GAMMA
    by_cost: bool = True
    rng_seed: int = 0
    learner_usd_per_h: float = 0.0


@dataclass(frozen=True, slots=True)
class Assumptions:
    """Values that hold until they are measured; None: unknown."""

    t_train_s: float | None = None
    t_bcast_s: float | None = None
    pause_s: float = 0.0
    t_gen_s: float = 0.0
    recompute_s: float = 0.0


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


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityBalance:
    """What is needed and what there is, in trajectories/s.

    mu_pool: of the active workers. mu_available: of all that are here. mu_target: mu_min with its
    margin, as raised by activation. feasible: whether all workers together reach it, and if not,
    why_not. why: the reason of the last decision, while it still holds.
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

    said: assumed until it is measured. why: the reason of the last decision that changed something.
    """

    rules: CapacityRules
    measurements: Measurements
    said: Assumptions = field(default_factory=Assumptions)
    activation: Activation = field(default_factory=Activation)
    why: str = ""

    def demand(self, kappa: int) -> Demand | None:
        """The learner's demand, as measured or else assumed; None where neither is known."""
        rules, said, measurements = self.rules, self.said, self.measurements
        t_train_s = _value(measurements.t_train.estimate, said.t_train_s)
        t_bcast_s = _value(measurements.t_bcast.estimate, said.t_bcast_s)
        if not t_train_s or t_bcast_s is None:
            return None
        return Demand(
            t_train_s,
            rules.trajectories_per_step,
            rules.staleness_max,
            kappa,
            t_bcast_s,
            rules.mode,
            _value(measurements.pause.estimate, said.pause_s) or 0.0,
            _value(measurements.t_gen.estimate, said.t_gen_s) or 0.0,
            rules.group_size,
            rules.gamma,
            share_of_bcast(_value(measurements.still.estimate, None), t_bcast_s),
            _value(measurements.recompute.estimate, said.recompute_s) or 0.0,
        )

    def publish_every(self) -> int:
        """kappa under "auto"; 1 until T_train and T_bcast are known."""
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
        return found if self.rules.by_cost else sorted(found, key=self._drawn)

    def review(
        self, candidates: Collection[Candidate], kappa: int, waited_s: float = 0.0, *, now: float
    ) -> Decision:
        """Which workers to activate and deactivate now; see `Activation.decide`.

        waited_s: for how long the learner has waited for rollouts since the run began.
        """
        demand = self.demand(kappa)
        period_s = None if demand is None else demand.period_s
        fresh = None if demand is None else mu_min(demand)
        rules = ActivationRules(review_s=0.0, gamma=self.rules.gamma, by_cost=self.rules.by_cost)
        if demand is not None:
            rules = ActivationRules(
                review_s=demand.period_s,
                cool_down_s=demand.t_bcast_s + demand.pause_s + demand.recompute_s,
                hold_s=HOLD_PERIODS * demand.period_s,
                gamma=self.rules.gamma,
                by_cost=self.rules.by_cost,
                learner_usd_per_h=self.rules.learner_usd_per_h,
            )
        decision = self.activation.decide(
            rules,
            self.offers(candidates, period_s),
            fresh if fresh is not None or demand is None else usable(demand),
            now=now,
            leaving={each.name for each in candidates if each.leaving},
            waited_s=None if fresh is None else waited_s,
        )
        self.why = decision.why or self.why
        return decision

    def shortfall(self, candidates: Iterable[Candidate], kappa: int) -> float | None:
        """Trajectories/s by which all workers here, active or not, miss gamma mu_min.

        Negative: they make more. None: mu_min is unknown, or no throughput is enough. Boxes are
        rented for it, and workers influence mu_min by what they report (durations, failures). So
        nothing is short once they make NEED_MAX times R / T, which only the learner reports.
        """
        demand = self.demand(kappa)
        needed = None if demand is None else mu_min(demand)
        if demand is None or needed is None:
            return None
        staying = [one for one in candidates if not one.leaving]
        here = sum(offer.mu for offer in self.offers(staying, None))
        most = NEED_MAX * self.rules.trajectories_per_step / demand.t_train_s
        wanted = self.activation.raised.factor * self.rules.gamma * needed
        return min(wanted - here, most - sum(one.mu for one in staying))

    def balance(
        self, offers: Sequence[WorkerOffer], active: Collection[str], kappa: int
    ) -> CapacityBalance:
        """Of the workers that are here, each with all of its mu, as decisions count it."""
        demand = self.demand(kappa)
        mu_pool = sum(offer.mu for offer in offers if offer.name in active)
        available = sum(offer.mu for offer in offers)
        verdict = Verdict(None, None, (), ()) if demand is None else judge(demand, available)
        return CapacityBalance(
            mu_pool=mu_pool,
            mu_min=verdict.mu_min,
            mu_target=None
            if verdict.target is None
            else verdict.target * self.activation.raised.factor,
            mu_available=available,
            bubble_predicted=None if demand is None else bubble(demand, mu_pool),
            feasible=None if demand is None else verdict.feasible,
            why_not=verdict.why_not,
            why=self._why(demand, verdict),
            verdict=verdict,
        )

    # --- inside

    def _why(self, demand: Demand | None, verdict: Verdict) -> str:
        """The reason of the last decision, while it still holds."""
        if demand is None:
            return NOT_MEASURED
        if verdict.mu_min is None:
            return NOT_FRESH
        return "" if self.why == NOT_MEASURED else self.why

    def _drawn(self, offer: WorkerOffer) -> bytes:
        """A sort key that depends on this worker alone, not on which others are here."""
        return blake3(f"{self.rules.rng_seed} {offer.name}".encode()).digest(8)


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
        each.name, each.mu * used, price.usd_per_h + traffic, price.availability, each.guessed
    )


def _value(measured: Estimate | None, said: float | None) -> float | None:
    return said if measured is None else measured.value
