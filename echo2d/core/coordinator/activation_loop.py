"""Who of the workers that are here is to work: the closed loop of a running coordinator.

    work, refits, broadcasts --> measures --+
                                            +--> a look, once a publish period, and at once when somebody comes,
    members: joined, serving, prices -------+    begins to serve, is lost or says that it will be --> active, standby

Of a storm of changes (500 workers that join) only the first is looked at at once, and the rest SOON_S later.

"all": everybody works; what is needed and what is short is known all the same. "auto": those whom `provisioning` takes;
the others stand by: they get no leases, finish what they hold, receive versions and pass them on. Who serves nothing
yet is no candidate, and waited for as one who will work. A control link that breaks is no loss until its silence is;
but who cannot be spoken to takes nobody's place.
Kept true: a worker that serves a version is active exactly if it was taken. Not here: leases, and renting more.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from echo2d.core.base.ids import PeerId
from echo2d.core.broadcast.publishing import Publishing
from echo2d.core.capacity.bottleneck import BUBBLE_STEPS, Situation, bottleneck
from echo2d.core.capacity.demand import Candidate, CapacityPlanner, CapacityRules
from echo2d.core.capacity.estimators import Estimate
from echo2d.core.capacity.measurements import Measurements
from echo2d.core.capacity.prices import Price, price_of
from echo2d.core.cluster.events import Note
from echo2d.core.cluster.membership import Membership, Peer
from echo2d.core.cluster.rules import RunRules
from echo2d.core.cluster.statistics import Statistics
from echo2d.core.coordinator.events import CoordinatorAction
from echo2d.core.coordinator.learner_api import LearnerCalls
from echo2d.core.protocol.control_messages import RefitDone
from echo2d.core.rollouts.groups import Groups
from echo2d.core.rollouts.staleness import Staleness
from echo2d.core.status.schema import EstimatesStatus, EstimateStatus, ProvisionStatus

LOOK_S_MIN = 1.0  # between two looks of which nothing but time is the reason: shorter periods are none of a real run
SOON_S = 0.1  # between two looks because something changed: each of them looks at all workers
LATE_S = 1.0  # a look that comes so late was missed by a process that stood still
NAMES_MAX = 8  # in a note; how many more there are is said
PAUSES_MAX = (
    3.0  # times the usual pause: what a worker says beyond that is no reason to think it fast
)


@dataclass(frozen=True, slots=True)
class WorkerValue:
    """What a worker makes, and for what price; see `WorkerStatus`."""

    price: Price
    mu: float | None
    mu_sd: float | None
    rho: float | None


@dataclass(slots=True)
class ActivationLoop:
    """See the module docstring. `now` is monotonic seconds."""

    rules: RunRules
    members: Membership
    staleness: Staleness
    groups: Groups
    publishing: Publishing
    calls: LearnerCalls
    statistics: Statistics
    _capacity_planner: CapacityPlanner = field(init=False)
    _useless: set[PeerId] = field(default_factory=set)  # who could not be used at the last look
    _looked_at: float = math.inf
    _look_at: float = -math.inf
    _changed: bool = True  # somebody came, or was lost
    _changes_at: float = -math.inf  # when that may be looked at

    def __post_init__(self) -> None:
        rules = self.rules
        self._capacity_planner = CapacityPlanner(
            CapacityRules(
                rules.trajectories_per_step, rules.staleness_max, rules.group_size, rules.mode, rules.gamma,
                rules.by_cost,
            ),
            self.statistics.measurements,
        )  # fmt: skip

    # --- what happens

    def changed(self) -> None:
        """Somebody came, or began to serve, or was lost, or said that it will be."""
        self._changed = True

    def refitted(self, peer: Peer, done: RefitDone, *, now: float) -> None:
        """Its engines stood still for this version, and no longer than since it served the one before."""
        most_s = math.inf if peer.refitted_at is None else now - peer.refitted_at
        pause_s = min(done.pause_s, most_s)
        self.statistics.paused(pause_s)
        usual = self.statistics.measurements.pause.estimate
        still_s = min(pause_s, PAUSES_MAX * usual.value if usual is not None else 0.0)
        if self.rules.mode == "exclusive":
            still_s = max(
                still_s, min(done.held_s, most_s, self.publishing.came_s(peer, now=now) or 0.0)
            )
        self.statistics.measurements.stood_still(peer.peer, still_s, now=now)

    def advance(self, *, now: float) -> list[CoordinatorAction]:
        """Look, if it is time to; call it after every event, before leases are granted."""
        if not (now >= self._look_at or (self._changed and now >= self._changes_at)):
            return []
        demand = self._capacity_planner.demand(self.calls.publish_every)
        if now >= self._look_at:
            self._settle(0.0 if demand is None else demand.period_s, now)
            self._look_at = now + max(LOOK_S_MIN, 0.0 if demand is None else demand.period_s)
        self._changed, self._changes_at = False, now + SOON_S
        return (
            self._decide(list(self._candidates()), now) if self.rules.activation == "auto" else []
        )

    def wake_at(self) -> float | None:
        """When the next look is due; without workers none is."""
        if self._changed and self._changes_at > -math.inf:
            return min(self._look_at, self._changes_at)
        return self._look_at if any(self._here()) and self._look_at > -math.inf else None

    # --- what there is to say

    def provision(self) -> ProvisionStatus:
        """What is needed and what there is now; each worker's rate is that of the last look."""
        kappa, capacity_planner = self.calls.publish_every, self._capacity_planner
        demand = capacity_planner.demand(kappa)
        candidates = [each for each in self._candidates() if not each.leaving]
        offers = capacity_planner.offers(candidates, None if demand is None else demand.period_s)
        active = {each.peer for each in self._here() if each.active}
        balance = capacity_planner.balance(offers, active, kappa)
        standby = sum(offer.name not in active for offer in offers)
        bubble = self.statistics.bubble(BUBBLE_STEPS)
        situation = Situation(
            bubble, demand, balance.mu_pool, len(offers) - standby, standby,
            self.statistics.unscored_share(BUBBLE_STEPS), self.groups.unscored, self.calls.missing,
        )  # fmt: skip
        return ProvisionStatus(
            activation=self.rules.activation,
            learner_usd_per_h=self.rules.learner_usd_per_h,
            mu_pool=balance.mu_pool,
            mu_min=balance.mu_min,
            mu_target=balance.mu_target,
            mu_available=balance.mu_available,
            bubble_predicted=balance.bubble_predicted,
            feasible=balance.feasible,
            why_not=balance.why_not,
            changes=capacity_planner.activation.changes,
            why=balance.why,
            gamma=self.rules.gamma,
            mode=self.rules.mode,
            estimates=_estimates(self.statistics.measurements),
            shortfall=capacity_planner.shortfall(candidates, kappa),
            bubble=bubble,
            bottleneck=bottleneck(situation),
        )

    def of(self, peer: Peer) -> WorkerValue:
        measurements, price = self.statistics.measurements, self._price(peer)
        known, kept = measurements.rate(peer.peer), 1.0 - measurements.discards.estimate.value
        mu = measurements.mu(peer.peer, peer.slots, self._expected(peer)) * kept or None
        guessed = known is None or measurements.guessed(peer.peer)
        return WorkerValue(
            price,
            mu,
            mu_sd=None if known is None or guessed else known.sd * kept,
            rho=None if not mu else price.usd_per_h / (3600.0 * mu * price.availability),
        )

    def check(self) -> None:
        self._capacity_planner.activation.check()
        self.statistics.measurements.check()
        if self.rules.activation == "all":
            assert all(peer.active for peer in self.members)

    # --- inside

    def _here(self) -> Iterator[Peer]:
        return (peer for peer in self.members if peer.kind == "worker" and peer.state == "joined")

    def _candidates(self) -> Iterator[Candidate]:
        copies = self._copies()
        for peer in self._here():
            if peer.serving is not None and (peer.alive or peer.active):
                price, expected = self._price(peer), self._expected(peer)
                measurements = self.statistics.measurements
                mu, guessed = (
                    measurements.mu(peer.peer, peer.slots, expected),
                    measurements.guessed(peer.peer),
                )
                yield Candidate(
                    peer.peer, mu, price, copies.get(peer.peer, 0.0), peer.leaving, guessed
                )

    def _copies(self) -> dict[PeerId, float]:
        """What each peer sends of the version that spreads, as planned; of no interest where nothing is metered."""
        transmission = self.publishing.spreading
        metered = any(each.price.usd_per_gb_up for each in self.rules.prices)
        return (
            dict(transmission.plan.copies())
            if metered and transmission is not None and transmission.plan is not None
            else {}
        )

    def _price(self, peer: Peer) -> Price:
        return price_of(self.rules.prices, peer.name, peer.usd_per_h)

    def _expected(self, peer: Peer) -> float | None:
        per_h = self._price(peer).trajectories_per_h
        return None if per_h is None else per_h / 3600.0

    def _settle(self, period_s: float, now: float) -> None:
        """All rates as of now. Who could be used neither now nor at the last look might as well have held leases."""
        self._forgive(now)
        useless = {
            peer.peer for peer in self._here() if peer.active and self._is_useless(peer, now)
        }
        for peer in useless & self._useless:
            self.statistics.measurements.useless(peer, max(0.0, now - self._looked_at))
        self._useless, self._looked_at = useless, now
        said = {
            peer.peer: expected
            for peer in self._here()
            if (expected := self._expected(peer)) is not None
        }
        self.statistics.measurements.settle(period_s, said, now=now)

    def _forgive(self, now: float) -> None:
        """While this process stood still nobody got leases: no longer than a trajectory takes was anybody at work."""
        t_gen = self.statistics.measurements.t_gen.estimate
        late_s = now - self._look_at - (0.0 if t_gen is None else t_gen.value)
        for peer in self._here() if LATE_S < late_s < math.inf else ():
            self.statistics.measurements.forgive(peer.peer, late_s, now=now)

    def _is_useless(self, peer: Peer, now: float) -> bool:
        """It fails what it is given, or serves what is too old for any batch."""
        too_old = peer.serving is not None and peer.serving.version < self.staleness.oldest
        return too_old or peer.rest_until > now

    def _decide(self, candidates: list[Candidate], now: float) -> list[CoordinatorAction]:
        capacity_planner = self._capacity_planner
        decision = capacity_planner.review(candidates, self.calls.publish_every, now=now)
        taken = capacity_planner.activation.active
        for peer in self.members:
            active = peer.kind != "worker" or peer.serving is None or peer.peer in taken
            if peer.active != active:
                peer.active = active
                self.members.changed.add(peer.peer)
        words = [
            f"{word} {self._names(names)}"
            for word, names in _told(decision.activate, decision.deactivate)
        ]
        return (
            [Note("activation", f"{', '.join(words)}: {decision.why}")]
            if words and decision.why
            else []
        )

    def _names(self, peers: tuple[str, ...]) -> str:
        known = [self.members.get(PeerId(peer)) for peer in peers[:NAMES_MAX]]
        more = f" and {len(peers) - NAMES_MAX} more" if len(peers) > NAMES_MAX else ""
        return " ".join(peer.name for peer in known if peer is not None) + more


def _estimates(measurements: Measurements) -> EstimatesStatus:
    return EstimatesStatus(
        t_train_s=_estimate(measurements.t_train.estimate),
        t_bcast_s=_estimate(measurements.t_bcast.estimate),
        t_gen_s=_estimate(measurements.t_gen.estimate),
        refit_pause_s=_estimate(measurements.pause.estimate),
        still_s=_estimate(measurements.still.estimate),
        wire_bytes=_estimate(measurements.wire_bytes.estimate),
        discarded=_estimate(measurements.discards.estimate),
    )


def _estimate(found: Estimate | None) -> EstimateStatus | None:
    # JSON has no infinity, which is the uncertainty of a guess.
    if found is None:
        return None
    return EstimateStatus(found.value, found.sd if found.sd < math.inf else None, found.samples)


def _told(
    activate: tuple[str, ...], deactivate: tuple[str, ...]
) -> list[tuple[str, tuple[str, ...]]]:
    return [
        (word, names)
        for word, names in (("activated", activate), ("deactivated", deactivate))
        if names
    ]
