"""Decides which connected workers are active: the control loop of a running coordinator.

    work, refits, broadcasts --> measurements --+
                                                +--> review --> active, standby
    members: joined, serving, prices -----------+

A review takes place once per publish period, and at once when a worker joins, begins to serve, is
lost, is cordoned or announces that it leaves. When many changes come together, the first is
reviewed at once and the others together SOON_S later. With activation "all" every worker is active,
and the reviews only measure. With "auto" the planner (`capacity/demand.py`) chooses. A standby
worker gets no leases, finishes what it holds, and still receives versions and passes them on.

A worker that serves no version yet is not a candidate, and counts as active until it serves one. A
worker whose control link broke counts as lost only once it is suspected, but a disconnected worker
is never chosen as a replacement. Invariant: under "auto", a worker that serves a version is active
exactly if the planner chose it. Not here: leases, and renting more workers.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from echo2d.core.base.ids import PeerId
from echo2d.core.broadcast.publishing import Publishing
from echo2d.core.capacity.bottleneck import BUBBLE_STEPS, Situation, bottleneck
from echo2d.core.capacity.demand import Candidate, CapacityPlanner
from echo2d.core.capacity.estimators import Estimate
from echo2d.core.capacity.measurements import Measurements
from echo2d.core.capacity.model import Demand
from echo2d.core.cluster.events import Note
from echo2d.core.cluster.parts import RunParts
from echo2d.core.cluster.peer import Peer
from echo2d.core.coordinator.events import CoordinatorAction
from echo2d.core.coordinator.learner_api import LearnerCalls
from echo2d.core.protocol.control_messages import RefitDone
from echo2d.core.rules.prices import Price, price_of
from echo2d.core.status.schema import EstimatesStatus, EstimateStatus, ProvisionStatus
from echo2d.core.work.training.groups import Groups
from echo2d.core.work.training.staleness import Staleness

# Two periodic reviews are at least this far apart; no real run has a shorter publish period.
REVIEW_S_MIN = 1.0
# Two reviews that changes cause are at least this far apart, because each reads all workers.
SOON_S = 0.1
# One log line names at most this many workers and counts the others.
_NAMES_MAX = 8


@dataclass(frozen=True, slots=True)
class WorkerValue:
    """A worker's throughput and its price; the fields are those of `WorkerStatus`."""

    price: Price
    mu: float | None
    mu_sd: float | None
    rho: float | None


@dataclass(slots=True)
class ActivationLoop:
    """See the module docstring. `now` is monotonic seconds."""

    parts: RunParts
    staleness: Staleness
    groups: Groups
    publishing: Publishing
    calls: LearnerCalls
    _capacity_planner: CapacityPlanner = field(init=False)
    # The workers that could not be used at the last periodic review.
    _useless: set[PeerId] = field(default_factory=set)
    _reviewed_at: float = math.inf
    _review_at: float = -math.inf
    # A worker came or was lost; the review of that may take place from _changes_at on.
    _changed: bool = True
    _changes_at: float = -math.inf
    # When the next pool may be played.
    _play_at: float = -math.inf
    # The demand, and for which moment it was computed.
    _demand: tuple[float, Demand | None] | None = None

    def __post_init__(self) -> None:
        self._capacity_planner = CapacityPlanner(
            self.parts.rules, self.parts.statistics.measurements, sliced=True
        )

    # --- events

    def changed(self) -> None:
        """Ask for a review: a worker came, began to serve, was lost, or announced that it leaves."""
        self._changed = True

    def refitted(self, peer: Peer, done: RefitDone, *, now: float) -> float:
        """Record how long the worker's engines stood still to load a version and to recompute KV caches.

        Neither can have taken longer than the time since the engines loaded the previous version.
        Returns the seconds that do not count against the worker.
        """
        measurements = self.parts.statistics.measurements
        most_s = math.inf if peer.engine.refitted_at is None else now - peer.engine.refitted_at
        pause_s = min(done.pause_s, most_s)
        self.parts.statistics.paused(pause_s)
        recompute_s = None if done.recompute_s is None else min(done.recompute_s, most_s)
        self.parts.statistics.recomputed(done.recomputed_tokens, recompute_s)
        still_s = _believed(pause_s, measurements.pause.estimate)
        if self.parts.rules.dissemination.mode == "exclusive":
            still_s = max(
                still_s, min(done.held_s, most_s, self.publishing.came_s(peer, now=now) or 0.0)
            )
        measurements.stood_still(peer.peer, still_s, now=now)
        lost_s = _believed(recompute_s or 0.0, measurements.recompute.estimate)
        lost_s = min(lost_s, most_s - still_s)
        measurements.forgive(peer.peer, lost_s, now=now)
        before_s, forgiven_s = peer.engine.lost_s, still_s + lost_s
        peer.engine.lost_s = forgiven_s if before_s is None else 0.75 * before_s + 0.25 * forgiven_s
        return forgiven_s

    def _mu(self, peer: Peer, price: Price) -> float:
        """Trajectories/s of a worker, as if refits cost it H, the pool's average, with which the demand is charged.

        A worker that loses more than H to each version makes less than it was measured to make between refits.
        """
        mu = self.parts.statistics.measurements.mu(peer.peer, peer.slots, price.trajectories_per_s)
        if peer.engine.lost_s is None:
            return mu
        # A status asks for each worker, so the demand of a moment is computed once.
        if self._demand is None or self._demand[0] != self.parts.statistics.now:
            found = self._capacity_planner.demand(self.calls.publish_every)
            self._demand = self.parts.statistics.now, found
        _, demand = self._demand
        if demand is None or demand.lost_s >= demand.period_s:
            return mu
        left_s = max(0.0, demand.period_s - demand.loads * peer.engine.lost_s)
        return mu * left_s / (demand.period_s - demand.lost_s)

    def advance(self, *, now: float) -> list[CoordinatorAction]:
        """Review if one is due. Call it after every event, before leases are granted."""
        if self._capacity_planner.plays and now >= self._play_at:
            self._play_at = now + SOON_S
            self._changed = self._changed or not self._capacity_planner.play()
        if not (now >= self._review_at or (self._changed and now >= self._changes_at)):
            return []
        demand = self._capacity_planner.demand(self.calls.publish_every)
        settled = now >= self._review_at
        if settled:
            self._settle(0.0 if demand is None else demand.period_s, now)
            self._review_at = now + max(REVIEW_S_MIN, 0.0 if demand is None else demand.period_s)
        self._changed, self._changes_at = False, now + SOON_S
        candidates = list(self._candidates())
        if self.parts.rules.activation.mode == "auto":
            return self._decide(candidates, now)
        if settled or self._capacity_planner.pools is None:
            self._capacity_planner.price(candidates, self.calls.publish_every)
        return []

    def wake_at(self) -> float | None:
        """When the next review is due; None without workers."""
        times = [self._review_at]
        if self._capacity_planner.plays:
            times.append(self._play_at)
        if self._changed and self._changes_at > -math.inf:
            times.append(self._changes_at)
        if len(times) > 1:
            return min(times)
        return self._review_at if any(self._here()) and self._review_at > -math.inf else None

    # --- for the status

    def provision(self) -> ProvisionStatus:
        """Return what the run needs and what it has, with the workers' rates of the last review."""
        kappa, capacity_planner = self.calls.publish_every, self._capacity_planner
        demand = capacity_planner.demand(kappa)
        candidates = [each for each in self._candidates() if not each.leaving]
        offers = capacity_planner.offers(candidates, None if demand is None else demand.period_s)
        active = {each.peer for each in self._here() if each.service.active}
        balance = capacity_planner.balance(offers, active, kappa)
        standby = sum(offer.name not in active for offer in offers)
        bubble = self.parts.statistics.learner.bubble(BUBBLE_STEPS, now=self.parts.statistics.now)
        situation = Situation(
            bubble,
            demand,
            balance.mu_pool,
            len(offers) - standby,
            standby,
            self.parts.statistics.learner.unscored_share(
                BUBBLE_STEPS, now=self.parts.statistics.now
            ),
            self.groups.unscored,
            self.calls.missing,
            balance.verdict,
        )
        return ProvisionStatus(
            activation=self.parts.rules.activation.mode,
            learner_usd_per_h=self.parts.rules.activation.learner_usd_per_h,
            mu_pool=balance.mu_pool,
            mu_min=balance.mu_min,
            mu_target=balance.mu_target,
            mu_available=balance.mu_available,
            bubble_predicted=balance.bubble_predicted,
            feasible=balance.feasible,
            why_not=balance.why_not,
            changes=capacity_planner.activation.changes,
            why=balance.why,
            gamma=self.parts.rules.activation.gamma,
            gen_sigma=self.parts.statistics.measurements.lengths.sigma,
            mode=self.parts.rules.dissemination.mode,
            estimates=_estimates(self.parts.statistics.measurements),
            shortfall=capacity_planner.shortfall(candidates, kappa),
            bubble=bubble,
            bottleneck=bottleneck(situation),
        )

    def of(self, peer: Peer) -> WorkerValue:
        measurements, price = self.parts.statistics.measurements, self.price(peer)
        known, used = measurements.rate(peer.peer), measurements.yields.of(peer.peer)
        mu = self._mu(peer, price) * used or None
        guessed = known is None or measurements.guessed(peer.peer)
        return WorkerValue(
            price,
            mu,
            mu_sd=None if known is None or guessed else known.sd * used,
            rho=None if not mu else price.usd_per_h / (3600.0 * mu),
        )

    def check(self) -> None:
        self._capacity_planner.activation.check()
        self.parts.statistics.measurements.check()
        if self.parts.rules.activation.mode == "all":
            assert all(peer.service.active for peer in self.parts.members)

    # --- inside

    def _here(self) -> Iterator[Peer]:
        return (
            peer for peer in self.parts.members if peer.kind == "worker" and peer.state == "joined"
        )

    def _candidates(self) -> Iterator[Candidate]:
        copies = self._copies()
        for peer in self._here():
            if peer.engine.serving is not None and (peer.alive or peer.service.active):
                price, measurements = self.price(peer), self.parts.statistics.measurements
                yield Candidate(
                    peer.peer,
                    self._mu(peer, price),
                    price,
                    copies.get(peer.peer, 0.0),
                    peer.service.retiring,
                    measurements.guessed(peer.peer),
                    measurements.slots(peer.peer) or peer.slots,
                )

    def _copies(self) -> dict[PeerId, float]:
        """How many copies of the spreading version each peer sends, by the plan.

        Empty if no worker pays for what it sends.
        """
        transmission = self.publishing.spreading
        metered = any(each.price.usd_per_gb_up for each in self.parts.rules.prices)
        return (
            dict(transmission.plan.copies())
            if metered and transmission is not None and transmission.plan is not None
            else {}
        )

    def price(self, peer: Peer) -> Price:
        return price_of(self.parts.rules.prices, peer.name, peer.usd_per_h)

    def _settle(self, period_s: float, now: float) -> None:
        """Bring all rates up to date.

        A worker that could be used neither now nor at the last review is measured as if it had
        held leases and made nothing: its idle slots are its own fault.
        """
        self._forgive(now)
        useless = {
            peer.peer
            for peer in self._here()
            if peer.service.active and self._is_useless(peer, now)
        }
        for peer in useless & self._useless:
            self.parts.statistics.measurements.useless(peer, max(0.0, now - self._reviewed_at))
        self._useless, self._reviewed_at = useless, now
        said = {
            peer.peer: expected
            for peer in self._here()
            if (expected := self.price(peer).trajectories_per_s) is not None
        }
        self.parts.statistics.measurements.settle(period_s, said, now=now)

    def _forgive(self, now: float) -> None:
        """Subtract the time in which this process stood still from the workers' leased time.

        No worker got leases then, so each had work for at most one more trajectory.
        """
        t_gen = self.parts.statistics.measurements.t_gen.estimate
        late_s = now - self._review_at - (0.0 if t_gen is None else t_gen.value)
        # A review that is more than a second late was delayed because the whole process stood still.
        for peer in self._here() if 1.0 < late_s < math.inf else ():
            self.parts.statistics.measurements.forgive(peer.peer, late_s, now=now)

    def _is_useless(self, peer: Peer, now: float) -> bool:
        """Whether the worker fails its leases, or serves a version that is too old for any batch."""
        too_old = (
            peer.engine.serving is not None and peer.engine.serving.version < self.staleness.oldest
        )
        return too_old or peer.service.rest_until > now

    def _decide(self, candidates: list[Candidate], now: float) -> list[CoordinatorAction]:
        capacity_planner = self._capacity_planner
        waited_s = self.parts.statistics.learner.waited_for_rollouts_s(
            now=self.parts.statistics.now
        )
        decision = capacity_planner.review(candidates, self.calls.publish_every, waited_s, now=now)
        taken = capacity_planner.activation.active
        for peer in self.parts.members:
            active = peer.kind != "worker" or peer.engine.serving is None or peer.peer in taken
            if peer.service.active != active:
                peer.service.active = active
                self.parts.members.changed.add(peer.peer)
        words = [
            f"{word} {self._names(names)}"
            for word, names in (
                ("activated", decision.activate),
                ("deactivated", decision.deactivate),
            )
            if names
        ]
        return (
            [Note("activation", f"{', '.join(words)}: {decision.why}")]
            if words and decision.why
            else []
        )

    def _names(self, peers: tuple[str, ...]) -> str:
        known = [self.parts.members.get(PeerId(peer)) for peer in peers[:_NAMES_MAX]]
        more = f" and {len(peers) - _NAMES_MAX} more" if len(peers) > _NAMES_MAX else ""
        return " ".join(peer.name for peer in known if peer is not None) + more


def _believed(seconds: float, usual: Estimate | None) -> float:
    # At most 3 times the usual refit pause (or the usual time to recompute KV caches) is believed,
    # because a worker that claims to have lost more time gets a higher measured rate.
    return min(seconds, 3.0 * usual.value if usual is not None else 0.0)


def _estimates(measurements: Measurements) -> EstimatesStatus:
    return EstimatesStatus(
        t_train_s=_estimate(measurements.t_train.estimate),
        t_bcast_s=_estimate(measurements.t_bcast.estimate),
        t_gen_s=_estimate(measurements.t_gen.estimate),
        refit_pause_s=_estimate(measurements.pause.estimate),
        recompute_s=_estimate(measurements.recompute.estimate),
        still_s=_estimate(measurements.still.estimate),
        wire_bytes=_estimate(measurements.wire_bytes.estimate),
        discarded=_estimate(measurements.discards.estimate),
    )


def _estimate(found: Estimate | None) -> EstimateStatus | None:
    # A guess has an infinite uncertainty, which JSON cannot express: it becomes None.
    if found is None:
        return None
    return EstimateStatus(
        found.value, found.sd if found.sd < math.inf else None, round(found.samples)
    )
