"""The answer of `echo2d plan`: which workers to use, how long versions take to reach them, what a step costs, what if.

    all workers --T_bcast--> kappa, mu_min --price of a step with more or fewer workers (`pools`)--> the cheapest ones

T_bcast is the planner's prediction for a broadcast to all present workers, because workers on standby also receive
versions, plus the pause of a refit. Sending over a metered line costs money, so three cases are priced: all workers
pass versions on, all except the metered kinds do, or none does (a star). The cheapest case is the answer. Rates are
those of the file. Only the order of workers with `by_cost=False` is random. Not here: the formulas
(`capacity/model`), the choice (`capacity/worker_cost`), the trees (`topology/planner`), and what a run measures
(`world`).
"""

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, Literal

from echo2d.core.base.ids import FormId, PeerId, PlanId
from echo2d.core.capacity.bottleneck import BUSY
from echo2d.core.capacity.demand import spread_s
from echo2d.core.capacity.model import Demand, judge, publish_every_auto
from echo2d.core.capacity.pipeline import group_times
from echo2d.core.capacity.pools import Pools
from echo2d.core.capacity.worker_cost import (
    WorkerOffer,
    WorkerSet,
    bandwidth_usd_per_h,
    by_rho,
    choose,
    in_order,
)
from echo2d.core.protocol.control_messages import Address
from echo2d.core.topology.few_copies import seed_copies
from echo2d.core.topology.plan import Job, PeerFacts, Plan
from echo2d.core.topology.planner import plan_chains, plan_star
from echo2d.core.topology.shapes import AUTO, plan_shape
from echo2d.core.weights.form import frame_bytes_for
from echo2d.plan.fleet.spec import FleetSpec, WorkersTable
from echo2d.plan.fleet.spot_learner import SpotLearner
from echo2d.plan.kernel.scenario import MBIT
from echo2d.plan.kernel.scenario_file import TRIPS

WHAT_IF_S = 2  # values of S tried on either side of the file's
CountsByKind = Mapping[str, int]  # workers of each kind
Relays = Literal["all", "unmetered", "none"]  # which workers pass versions on


@dataclass(frozen=True, slots=True)
class Ablation:
    """Parts that can be switched off, to see what each is worth."""

    p2p: bool = True
    by_cost: bool = True
    delta: bool = True
    rng_seed: int = 0  # of the order in which workers are taken if prices do not count


@dataclass(frozen=True, slots=True)
class BroadcastForecast:
    """T_verify in seconds for each shape, and how often the form is sent."""

    star_s: float
    planned_s: float
    bound_s: float  # no plan can be faster
    # How many copies of the form one worker of each kind sends by the plan.
    copies: Mapping[str, float]
    seed_copies: float  # how many copies of the form the learner's host sends


@dataclass(frozen=True, slots=True)
class WhatIf:
    """One cell of the table over S and kappa."""

    staleness_max: int
    publish_every: int
    feasible: bool
    mu_min: float | None
    workers: int
    bubble: float
    usd_per_step: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """The answer. mu: trajectories/s."""

    demand: Demand
    feasible: bool
    why_not: str
    mu_min: float | None
    choice: WorkerSet
    broadcast: BroadcastForecast
    relays: Relays
    usd_per_h: float  # for the learner, the chosen workers, and bandwidth
    kinds: tuple[WorkersTable, ...]
    pools: Pools
    seed_usd_per_h: float = 0.0  # the part of usd_per_h for what the learner's host sends
    # The factor by which steps take longer because the learner's host is sometimes taken away (`spot_learner`).
    longer: float = 1.0
    # Seconds that a version takes through one chain of the chosen workers, for comparison; only `plan` computes it.
    chain_s: float = 0.0

    @property
    def mu_pool(self) -> float:
        return self.choice.mu

    @property
    def bubble(self) -> float:
        return self.pools.bubble(self.mu_pool)

    @property
    def step_s(self) -> float:
        return self.longer * self.pools.step_s(self.mu_pool)

    @property
    def why(self) -> str:
        """Why these workers: the price of a step with them, and with more or fewer."""
        return self.pools.why()

    @property
    def usd_per_step(self) -> float:
        """Usd; infinite if no step is ever done."""
        return self.usd_per_h / 3600.0 * self.step_s

    @property
    def counts(self) -> Counter[str]:
        return Counter(_kind_of(offer.name) for offer in self.choice.offers)

    def facts(self) -> dict[str, Any]:
        """For JSON: seconds, usd, trajectories/s; rho in usd per trajectory."""
        demand = self.demand
        return {
            "feasible": self.feasible,
            "why_not": self.why_not,
            "why": self.why,
            "mu_min": self.mu_min,
            "mu_target": self.pools.best.mu,
            "mu_pool": self.mu_pool,
            "bubble": self.bubble,
            "t_bcast_s": demand.t_bcast_s,
            "t_verify_s": {
                "star": self.broadcast.star_s,
                "chain": self.chain_s,
                "planned": self.broadcast.planned_s,
                "bound": self.broadcast.bound_s,
            },
            "seed_copies": self.broadcast.seed_copies,
            "seed_usd_per_h": self.seed_usd_per_h,
            "relays": self.relays,
            "mode": demand.mode,
            "staleness_max": demand.staleness_max,
            "publish_every": demand.publish_every,
            "step_s": _finite(self.step_s),
            "usd_per_h": self.usd_per_h,
            "usd_per_step": _finite(self.usd_per_step),
            "usd_per_1000_steps": _finite(1000 * self.usd_per_step),
            "workers": self.workers(),
        }

    def workers(self) -> list[dict[str, Any]]:
        """A row for each kind that was chosen, cheapest trajectories first."""
        first = {_kind_of(offer.name): offer for offer in reversed(self.choice.offers)}
        rows = [
            {
                "name": name,
                "count": self.counts[name],
                "rho": _finite(offer.rho),
                "usd_per_h": offer.usd_per_h,
                "mu": offer.mu,
            }
            for name, offer in first.items()
        ]
        return sorted(rows, key=lambda row: (row["rho"] is None, row["rho"]))


@lru_cache(maxsize=8)
def provision(fleet: FleetSpec, ablation: Ablation | None = None) -> Forecast:
    """The answer for this fleet."""
    return BroadcastForecasts(fleet, ablation or Ablation()).plan()


def what_if(fleet: FleetSpec, ablation: Ablation | None = None) -> list[WhatIf]:
    """The answers with other S and kappa."""
    planner = BroadcastForecasts(fleet, ablation or Ablation())
    here = fleet.learner.staleness_max
    # The table shows kappa up to 6.
    cells = [
        (bound, kappa)
        for bound in range(max(0, here - WHAT_IF_S), here + WHAT_IF_S + 1)
        for kappa in range(1, min(bound + 1, 6) + 1)
    ]
    return [_cell(planner.cheapest(bound, kappa)) for bound, kappa in cells]


def _cell(found: Forecast) -> WhatIf:
    demand, workers = found.demand, len(found.choice.offers)
    return WhatIf(
        demand.staleness_max, demand.publish_every, found.feasible, found.mu_min, workers, found.bubble,
        found.usd_per_step,
    )  # fmt: skip


@dataclass
class BroadcastForecasts:
    """Makes forecasts of one fleet, and keeps the predicted broadcasts by the number of workers of each kind."""

    fleet: FleetSpec
    ablation: Ablation
    _broadcasts: dict[tuple[Relays, tuple[int, ...], float | None], BroadcastForecast] = field(
        default_factory=dict
    )

    def plan(self) -> Forecast:
        """The forecast for the file's S and kappa, with the time that a chain would take."""
        found = self.cheapest()
        return replace(found, chain_s=self._chain_s(found.counts))

    def cheapest(
        self, staleness_max: int | None = None, publish_every: int | str | None = None
    ) -> Forecast:
        """The cheapest forecast for these S and kappa; the default is the file's."""
        learner = self.fleet.learner
        bound = learner.staleness_max if staleness_max is None else staleness_max
        kappa = learner.publish_every if publish_every is None else publish_every
        found = [self._priced(bound, kappa, relays) for relays in self._relays()]
        return min(found, key=lambda each: each.usd_per_step)

    def _relays(self) -> tuple[Relays, ...]:
        if not self.ablation.p2p:
            return ("none",)
        metered = [kind.usd_per_gb_up > 0 for kind in self.fleet.workers]
        return ("all", "unmetered", "none") if any(metered) else ("all",)

    def broadcast(
        self, counts: CountsByKind, relays: Relays = "all", within_s: float | None = None
    ) -> BroadcastForecast:
        """Predict a broadcast to this many workers of each kind.

        within_s: the seed sends as few copies as this time allows; None: its bytes cost nothing.
        """
        at = relays, tuple(counts.get(kind.name, 0) for kind in self.fleet.workers), within_s
        if at not in self._broadcasts:
            self._broadcasts[at] = self._spread(counts, relays, within_s)
        return self._broadcasts[at]

    # --- inside

    def _priced(self, bound: int, kappa: int | str, relays: Relays) -> Forecast:
        """The forecast for one choice of the workers that pass versions on."""
        learner, policy = self.fleet.learner, self.fleet.policy
        counts = Counter({kind.name: _there(kind) for kind in self.fleet.workers})
        broadcast = self.broadcast(counts, relays)
        demand = self._demand(broadcast, bound, kappa)
        if learner.usd_per_gb_up:
            within_s = spread_s(demand, policy.pause_s)
            broadcast = self.broadcast(counts, relays, within_s)
            demand = self._demand(broadcast, bound, kappa)
        offers = [
            offer
            for kind in self.fleet.workers
            for offer in self._offers(kind, demand, broadcast.copies)
        ]
        available = sum(offer.mu for offer in offers)
        verdict = judge(demand, available)
        ranked = self._ranked(offers)
        spot = SpotLearner.of(learner)
        pools = Pools(demand, ranked, spot.paid * learner.usd_per_h).played()
        chosen = self._choose(ranked, pools.best.mu)
        busy = pools.bubble(available) <= BUSY
        # A learner whose host is taken away publishes less often.
        seed_usd_per_h = self._seed_usd_per_h(demand, broadcast) / spot.longer
        usd_per_h = spot.paid * learner.usd_per_h + chosen.usd_per_h + seed_usd_per_h
        return Forecast(
            demand, busy or verdict.feasible, "" if busy else verdict.why_not, verdict.mu_min, chosen, broadcast,
            relays, usd_per_h, self.fleet.workers, pools, seed_usd_per_h, spot.longer,
        )  # fmt: skip

    def _demand(self, broadcast: BroadcastForecast, bound: int, kappa: int | str) -> Demand:
        learner, policy = self.fleet.learner, self.fleet.policy
        t_bcast_s = policy.t_bcast_s or broadcast.planned_s + policy.pause_s
        lengths, size = self.fleet.lengths, self.fleet.simulate.group_size
        t_gen_s = policy.t_gen_s * group_times(lengths, size, policy.group_patience)
        demand = Demand(
            SpotLearner.of(learner).t_train_s, learner.trajectories_per_step, bound, 1, t_bcast_s, policy.mode,
            policy.pause_s, t_gen_s, size, policy.gamma, policy.still_share, policy.recompute_s, lengths,
            policy.group_patience, policy.no_variance,
        )  # fmt: skip
        every = kappa if isinstance(kappa, int) else publish_every_auto(demand)
        return replace(demand, publish_every=every)

    def _seed_usd_per_h(self, demand: Demand, broadcast: BroadcastForecast) -> float:
        """Usd per hour for the traffic of versions that the learner's host sends."""
        return bandwidth_usd_per_h(
            publishes_per_h=3600.0 / demand.period_s,
            wire_bytes=self.fleet.model.wire_bytes(delta=self.ablation.delta),
            copies_sent=broadcast.seed_copies,
            usd_per_gb_down=0.0,
            usd_per_gb_up=self.fleet.learner.usd_per_gb_up,
        )

    def _offers(
        self, kind: WorkersTable, demand: Demand, copies: Mapping[str, float]
    ) -> list[WorkerOffer]:
        traffic = bandwidth_usd_per_h(
            publishes_per_h=3600.0 / demand.period_s,
            wire_bytes=self.fleet.model.wire_bytes(delta=self.ablation.delta),
            copies_sent=copies.get(kind.name, 0.0),
            usd_per_gb_down=kind.usd_per_gb_down,
            usd_per_gb_up=kind.usd_per_gb_up,
        )
        waste = self.fleet.policy.no_variance
        mu, usd = (
            (1.0 - waste) * kind.trajectories_per_h / 3600.0,
            self.fleet.usd_per_h(kind) + traffic,
        )
        slots = self.fleet.slots(kind)
        return [
            WorkerOffer(f"{kind.name}#{number}", mu, usd, slots=slots, waste=waste)
            for number in range(1, _there(kind) + 1)
        ]

    def _ranked(self, offers: list[WorkerOffer]) -> list[WorkerOffer]:
        order = by_rho(offers)
        if not self.ablation.by_cost:
            random.Random(self.ablation.rng_seed).shuffle(order)
        return order

    def _choose(self, ranked: list[WorkerOffer], target: float) -> WorkerSet:
        if self.ablation.by_cost:
            return choose(ranked, target)
        taken = tuple(in_order(ranked, target))
        enough = sum(offer.mu for offer in taken) >= target
        return WorkerSet(taken, enough=enough, exact=False, bound_usd_per_h=0.0)

    @cached_property
    def _seed(self) -> PeerFacts:
        uplink = self.fleet.learner.uplink_mbps * MBIT
        return PeerFacts(PeerId("seed"), uplink, uplink, Address("seed", 1), latency_s=0.0)

    @cached_property
    def _job(self) -> Job:
        wire_bytes = self.fleet.model.wire_bytes(delta=self.ablation.delta)
        return Job(FormId("0"), wire_bytes, frame_bytes_for(wire_bytes))

    def _spread(
        self, counts: CountsByKind, relays: Relays, within_s: float | None
    ) -> BroadcastForecast:
        peers = self._peers(counts, relays)
        if not peers:
            return BroadcastForecast(0.0, 0.0, 0.0, {}, 0.0)
        star = plan_star(PlanId(0), self._job, self._seed, peers)
        planned = plan_shape(AUTO, PlanId(0), self._job, self._seed, peers, within_s=within_s)
        copies, sent = _copies_by_kind(planned, counts), seed_copies(planned)
        return BroadcastForecast(
            star.predicted_s, planned.predicted_s, planned.bound_s, copies, sent
        )

    def _chain_s(self, counts: CountsByKind) -> float:
        peers = self._peers(counts)
        return plan_chains(PlanId(0), self._job, self._seed, peers, 1).predicted_s if peers else 0.0

    def _peers(self, counts: CountsByKind, relays: Relays = "all") -> list[PeerFacts]:
        silent = {
            kind.name
            for kind in self.fleet.workers
            if relays == "none" or (relays != "all" and kind.usd_per_gb_up > 0)
        }
        return [
            _facts(kind, number, receive_only=kind.name in silent)
            for kind in self.fleet.workers
            for number in range(counts.get(kind.name, 0))
        ]


def _there(kind: WorkersTable) -> int:
    """The workers of a kind that are present on average; workers that are away cost nothing."""
    return max(1, round(kind.count * kind.availability))


def _facts(kind: WorkersTable, number: int, *, receive_only: bool) -> PeerFacts:
    name = f"{kind.name}#{number}"
    latency_s = kind.rtt_ms / 1000.0 / TRIPS
    return PeerFacts(
        PeerId(name),
        kind.uplink_mbps * MBIT,
        kind.downlink_mbps * MBIT,
        Address(name, 1),
        receive_only,
        latency_s,
    )


def _copies_by_kind(plan: Plan, counts: CountsByKind) -> dict[str, float]:
    """The mean copies for each kind. Workers of one kind differ only in their names, so the mean stands for each."""
    sent: Counter[str] = Counter()
    for peer, copies in plan.copies().items():
        if peer != plan.root:
            sent[_kind_of(peer)] += copies  # type: ignore[assignment]  # a Counter of floats
    return {name: sent[name] / count for name, count in counts.items() if count}


def _kind_of(worker: str) -> str:
    return worker.rpartition("#")[0]


def _finite(value: float) -> float | None:
    return value if value < float("inf") else None
