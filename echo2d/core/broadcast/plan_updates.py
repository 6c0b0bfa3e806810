"""Decides when a plan is made or replaced, and measures the rates that plans are made from.

    transfer reports --> rates --a version's first root--> plan --LEARN_S, if it was a guess-->
        another plan, if that is much better

Catch-ups are planned with these rates, too, but their transfers do not update the rates.
Not here: what a plan is (`topology.plan`, `topology.planner`), how one is repaired
(`transmission`), and which form a peer takes (`catch_up_policy`).
"""

import math
from collections.abc import Iterable, Sequence

from echo2d.core.base.ids import TAG_SHIFT, PeerId, PlanId
from echo2d.core.broadcast.announcer import Announcer
from echo2d.core.broadcast.events import BroadcastAction, RatesMeasured
from echo2d.core.broadcast.transmission import Transmission
from echo2d.core.cluster.events import Persist
from echo2d.core.cluster.membership import Membership
from echo2d.core.cluster.peer import Peer
from echo2d.core.cluster.run_capacity import spread_s
from echo2d.core.cluster.statistics import Statistics
from echo2d.core.protocol.control_messages import TransferReport
from echo2d.core.rules.run import RunRules
from echo2d.core.topology.plan import Plan
from echo2d.core.topology.uplink_rates import PeerRate, Rates

# A smaller version fits into the kernel's buffers, so its transfer would not measure the links.
MEASURED_BYTES_MIN = 16 << 20


class PlanUpdates:
    """See the module docstring. `now` is monotonic seconds. tag: the upper bits of plan ids."""

    def __init__(
        self,
        rules: RunRules,
        *,
        members: Membership,
        announcer: Announcer,
        statistics: Statistics,
        rates: Iterable[PeerRate],
        tag: int,
    ) -> None:
        self._rules, self._members, self._announcer = rules, members, announcer
        self._statistics = statistics
        self._rates = Rates(rates)
        self._next_plan = tag << TAG_SHIFT
        # The plan of the version that spread before.
        self._last_plan: Plan | None = None

    def joined(self, peer: Peer) -> None:
        """A peer joined: set its uplink to the rate that was measured before."""
        peer.reach.uplink = self._rates.uplink(peer.peer)

    def measured(
        self, transmission: Transmission, peer: PeerId, message: TransferReport, now: float
    ) -> None:
        """A peer reported what it received on each link, and how long its own uplink was busy."""
        transmission.moved(now)
        if transmission.expected_bytes < MEASURED_BYTES_MIN:
            return
        for sample in message.links:
            if 0 <= sample.seconds < math.inf:
                self._rates.received(sample.peer, peer, sample.payload_bytes, sample.seconds)
        if 0 <= message.busy_s < math.inf:
            self._rates.busy(peer, message.busy_s)

    def plan(
        self, transmission: Transmission, seed: Peer, takers: Sequence[Peer], *, waited_s: float
    ) -> list[BroadcastAction]:
        """Make a plan for the spreading version, by the rates measured so far.

        waited_s: seconds since its publish.
        """
        actions = self._judge(seed)
        edges = transmission.make_plan(
            self._new_id(),
            self._rules,
            seed,
            takers,
            transmission.plan or self._last_plan,
            within_s=spread_s(self._rules, self._statistics, waited_s),
        )
        self._rates.begin(transmission.plan)
        return [*actions, *self._announcer.edges(edges)]

    def plan_aside(
        self, transmission: Transmission, seed: Peer, takers: Sequence[Peer]
    ) -> list[BroadcastAction]:
        """Plan a catch-up with the rates that broadcasts are planned with; its transfers do not update these rates."""
        return self._announcer.edges(
            transmission.make_plan(self._new_id(), self._rules, seed, takers)
        )

    def learn(
        self, transmission: Transmission, takers: Sequence[Peer], *, waited_s: float
    ) -> list[BroadcastAction]:
        """Replace a plan that was a guess, if another one is much better by the rates measured so
        far. waited_s: seconds from the publish until the version began to spread.

        After a change of plan, links carry only what is still missing, so nothing is measured then.
        """
        seed = self._members.seed
        if seed is None:
            transmission.learn_at = math.inf
            return []
        actions = self._judge(seed)
        within_s = spread_s(self._rules, self._statistics, waited_s)
        edges = transmission.learn(self._new_id(), self._rules, seed, takers, within_s=within_s)
        if not edges and transmission.plan is not None:
            self._rates.begin(transmission.plan)
        return [*actions, *self._announcer.edges(edges)]

    def ended(self, transmission: Transmission) -> None:
        """Another version spreads next, and may keep this one's trees."""
        self._last_plan = transmission.plan or self._last_plan

    def _judge(self, seed: Peer) -> list[BroadcastAction]:
        """Update the peers' rates by all reports so far."""
        changed = self._rates.judge()
        receivers = self._members.receivers()
        rates = self._rates.to_plan_with([seed.peer, *(peer.peer for peer in receivers)])
        for peer in (seed, *receivers):
            peer.reach.uplink = rates.get(peer.peer)
        return [Persist(RatesMeasured(changed))] if changed else []

    def _new_id(self) -> PlanId:
        self._next_plan += 1
        return PlanId(self._next_plan - 1)

    def check(self) -> None:
        self._rates.check()
