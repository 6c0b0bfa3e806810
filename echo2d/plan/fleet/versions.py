"""Versions on their way to the workers of a simulated fleet.

    published --> waits (an older one is dropped) --> spreads for the predicted time --> all refit --> served

All workers that were present when a broadcast began receive the version at the same moment. In exclusive mode workers
stop for the last part of the broadcast; in background mode they stop only for the refit. After the refit they compute
KV caches again. A worker that joins later fetches the newest version in full. Not here: when the learner publishes,
and which workers are active.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Protocol

from echo2d.core.base.ids import Digest, Epoch, PeerId, RequestId, Version
from echo2d.core.capacity.demand import CapacityPlanner
from echo2d.core.cluster.events import PublishAsked, VersionPublished
from echo2d.core.cluster.parts import RunParts
from echo2d.core.cluster.peer import Peer
from echo2d.core.cluster.versions import key_of
from echo2d.core.protocol.control_messages import RefitDone, VersionKey
from echo2d.plan.fleet.forecast import (
    Ablation,
    BroadcastForecast,
    BroadcastForecasts,
    provision,
)
from echo2d.plan.fleet.spec import FleetSpec
from echo2d.plan.fleet.worker import FleetWorker
from echo2d.plan.kernel.scenario import MBIT
from echo2d.plan.kernel.virtual_clock import Clock

# If the seed sends more than one copy, a prediction is used again while the allowed time changes by less than this
# factor.
WITHIN_NEAR = 1.1


class LostTime(Protocol):
    """A function that is called with the seconds for which a worker has just generated nothing."""

    def __call__(self, worker: PeerId, seconds: float, *, now: float) -> None: ...


class FleetVersions:
    """See the module docstring. published: the newest published step. served: is called when a version is served."""

    def __init__(
        self,
        fleet: FleetSpec,
        ablation: Ablation,
        clock: Clock,
        boxes: Mapping[PeerId, FleetWorker],
        *,
        parts: RunParts,
        capacity_planner: CapacityPlanner,
        served: Callable[[], None],
    ) -> None:
        self._fleet, self._ablation, self._clock, self._boxes = fleet, ablation, clock, boxes
        self._members, self._versions = parts.members, parts.versions
        self._statistics = parts.statistics
        self._capacity_planner, self._are_served = capacity_planner, served
        self._planner = BroadcastForecasts(fleet, ablation)
        # Which workers relay depends on prices, even if the choice of workers ignores them.
        self.relays = provision(fleet, replace(ablation, by_cost=True)).relays
        self._predicted: tuple[dict[str, int], BroadcastForecast] | None = None
        # Seconds that the last predicted broadcast was allowed to take; None: bytes cost nothing.
        self._within_s: float | None = None
        self._expected_s: dict[int, float] = {}  # for each version, seconds after its publish
        self._spreading: VersionPublished | None = None
        self._waiting: VersionPublished | None = None
        self._publish_at: dict[int, float] = {}
        self.published = 0
        self.egress_gb = self.relayed_gb = self.bandwidth_usd = self.seed_usd = 0.0
        self.spread = 0  # versions that have begun to spread
        self._statistics.measurements.wire_bytes.add(
            float(fleet.model.wire_bytes(delta=ablation.delta))
        )

    @property
    def copies(self) -> Mapping[str, float]:
        """How many copies of a version a worker of each kind passes on, by the last prediction."""
        return {} if self._predicted is None else self._predicted[1].copies

    @property
    def copies_each(self) -> float:
        """How many copies of a version the learner's host has sent on average."""
        gb = self._fleet.model.wire_bytes(delta=self._ablation.delta) / 1e9
        return self.egress_gb / gb / self.spread if self.spread else 0.0

    def publish(self, step: int) -> None:
        self.published = step
        digest = Digest(step.to_bytes(32, "big"))
        asked = PublishAsked(RequestId(0), Epoch(1), Version(step), digest, f"v{step}", 0)
        self._waiting = self._versions.publish(asked)
        self._versions.surplus([], bases=0, bytes_max=1)
        self._publish_at[step] = self._clock.now
        self._spread()

    def joined(self, box: FleetWorker) -> None:
        """Let a new worker fetch the newest version in full, at its downlink's rate."""
        if self._versions.newest is not None and self._clock.now > 0:
            takes_s = self._fleet.model.wire_bytes(delta=False) / (box.kind.downlink_mbps * MBIT)
            self._clock.after(takes_s, self._catch_up, box)

    # --- inside

    def _catch_up(self, box: FleetWorker) -> None:
        served = [
            other.peer.engine.serving
            for other in self._boxes.values()
            if other.here and other.peer.engine.serving is not None
        ]
        if box.here and self._versions.newest is not None:
            # If all workers were away, only the learner's host has the newest version.
            newest = key_of(self._versions.newest)
            self._refit(box, max(served, key=lambda key: key.version, default=newest))
            self._are_served()

    def _spread(self) -> None:
        """Begin the broadcast of the waiting version, once the one before it has arrived."""
        if self._spreading is not None or self._waiting is None:
            return
        self._spreading, self._waiting = self._waiting, None
        receivers = [box for box in self._boxes.values() if box.here]
        waited_s = self._clock.now - self._publish_at[self._spreading.version]
        broadcast = self._broadcast(receivers, waited_s)
        takes_s, copies = broadcast.planned_s, broadcast.seed_copies
        self._expected_s[self._spreading.version] = waited_s + takes_s
        self.spread += 1
        gb = self._fleet.model.wire_bytes(delta=self._ablation.delta) / 1e9
        self.egress_gb += gb * copies
        self.seed_usd += gb * copies * self._fleet.learner.usd_per_gb_up
        self.relayed_gb += gb * (len(receivers) - copies)
        for box in receivers:
            if box.active_since is not None:
                sent = broadcast.copies.get(box.kind.name, 0.0)
                self.bandwidth_usd += gb * (
                    box.kind.usd_per_gb_down + sent * box.kind.usd_per_gb_up
                )
        if self._fleet.policy.mode == "exclusive":
            t_bcast_s = takes_s + self._fleet.policy.pause_s
            still_s = self._fleet.policy.still_share * t_bcast_s
            still = self._statistics.measurements.stood_still
            self._clock.after(t_bcast_s - still_s, self._pause, receivers, still_s, still)
        self._clock.after(takes_s, self._finish_broadcast, self._spreading, receivers)

    def _broadcast(self, receivers: Iterable[FleetWorker], waited_s: float) -> BroadcastForecast:
        counts: dict[str, int] = {}
        for box in receivers:
            counts[box.kind.name] = counts.get(box.kind.name, 0) + 1
        within_s = self._spread_s(waited_s)
        if (
            self._predicted is not None
            and _near(counts, self._predicted[0])
            and self._suits(self._predicted[1], within_s)
        ):
            return self._predicted[1]
        self._predicted = counts, self._planner.broadcast(counts, self.relays, within_s)
        self._within_s = within_s
        known_s = self._predicted[1].planned_s + self._fleet.policy.pause_s
        self._capacity_planner.said = replace(self._capacity_planner.said, t_bcast_s=known_s)
        return self._predicted[1]

    def _spread_s(self, waited_s: float) -> float | None:
        """Seconds that a broadcast may take, as in a run; None: the host's bytes cost nothing."""
        if not self._fleet.learner.usd_per_gb_up:
            return None
        planner = self._capacity_planner
        return planner.spread_s(planner.publish_every(), waited_s)

    def _suits(self, last: BroadcastForecast, within_s: float | None) -> bool:
        """Whether the last prediction still sends as few copies as there is time for."""
        if not within_s or not self._within_s:
            return within_s == self._within_s
        if last.seed_copies <= 1.0 + 1e-9:
            return last.planned_s <= within_s
        return self._within_s / WITHIN_NEAR <= within_s <= self._within_s * WITHIN_NEAR

    def _finish_broadcast(self, record: VersionPublished, receivers: list[FleetWorker]) -> None:
        """All receivers hold the version, and refit; the next one may spread."""
        self._spreading = None
        pause_s = self._fleet.policy.pause_s
        if self._fleet.policy.mode == "background":
            still = self._statistics.measurements.stood_still
            self._pause([box for box in receivers if box.here], pause_s, still)
        self._clock.after(pause_s, self._finish_refits, record, receivers)
        self._spread()

    def _finish_refits(self, record: VersionPublished, receivers: list[FleetWorker]) -> None:
        active = [box.peer.peer for box in receivers if box.peer.service.active]
        self._statistics.broadcast(
            self._clock.now - self._publish_at[record.version],
            active,
            cold=False,
            expected_s=self._expected_s.pop(record.version),
        )
        # The pause is counted once for all workers, because they pause equally long.
        self._statistics.paused(self._fleet.policy.pause_s)
        recompute_s = self._fleet.policy.recompute_s
        self._statistics.recomputed(0, recompute_s)
        here = [box for box in receivers if box.here]
        if recompute_s:
            self._pause(here, recompute_s, self._statistics.measurements.forgive)
        for box in here:
            self._refit(box, key_of(record))
        self._are_served()

    def _refit(self, box: FleetWorker, key: VersionKey) -> None:
        if box.peer.engine.serving is not None and box.peer.engine.serving.version >= key.version:
            return
        box.peer.engine.refitted(
            RefitDone(
                key.version,
                key.digest,
                self._fleet.policy.pause_s,
                memory_ok=None,
                recompute_s=self._fleet.policy.recompute_s,
            )
        )
        self._mark_changed(box)

    def _pause(self, boxes: list[FleetWorker], seconds: float, measured: LostTime) -> None:
        """Let these workers generate nothing for this long. They get no leases meanwhile, so that their next samples
        are written by the new version. measured: is called for each worker at the end of the pause.
        """
        paused = []
        for box in boxes:
            if box.here and box.peer.engine.serving is not None:
                paused.append((box.peer, box.pause(seconds, self._clock.now)))
                box.peer.service.rest_until = max(box.peer.service.rest_until, box.paused_until)
                self._mark_changed(box)
        self._clock.after(seconds, self._end_pause, paused, measured)

    def _mark_changed(self, box: FleetWorker) -> None:
        """Mark an active worker as changed, so that the scheduler considers it for leases."""
        if box.peer.service.active:
            self._members.changed.add(box.peer.peer)

    def _end_pause(self, paused: list[tuple[Peer, float]], measured: LostTime) -> None:
        for peer, seconds in paused:
            measured(peer.peer, seconds, now=self._clock.now)


def _near(counts: dict[str, int], others: dict[str, int]) -> bool:
    """Whether the number of workers of every kind is nearly the same."""
    names = counts.keys() | others.keys()
    # A broadcast is predicted again when more than 5 % of a kind have joined or left.
    return all(
        abs(counts.get(name, 0) - others.get(name, 0)) <= math.ceil(0.05 * others.get(name, 0))
        for name in names
    )
