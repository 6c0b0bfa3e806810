"""The plans of the version that spreads, by the rates that the ones before have shown; those of catch-ups beside it.

    reports of who receives --> rates --(a version's first root)--> plan --(LEARN_S of a guess)--> another, if better

Not here: what a plan is (`topology/plan`, `topology/planner`), how one is mended (`transmission`), and who takes
which form.
"""

import math
from collections.abc import Iterable, Sequence

from echo2d.core.base.ids import TAG_SHIFT, PeerId, PlanId
from echo2d.core.broadcast.announcer import Announcer
from echo2d.core.broadcast.events import BroadcastAction, RatesMeasured
from echo2d.core.broadcast.transmission import Transmission
from echo2d.core.cluster.events import Persist
from echo2d.core.cluster.membership import Membership, Peer
from echo2d.core.cluster.rules import RunRules
from echo2d.core.protocol.control_messages import TransferReport
from echo2d.core.topology.plan import Plan
from echo2d.core.topology.uplink_rates import PeerRate, Rates

MEASURED_BYTES_MIN = (
    16 << 20
)  # a smaller version fits into the kernel's buffers, and measures those


class PlanUpdates:
    """See the module docstring. `now` is monotonic seconds; tag: in front of the plans' ids."""

    def __init__(
        self,
        rules: RunRules,
        *,
        members: Membership,
        announcer: Announcer,
        rates: Iterable[PeerRate],
        tag: int,
    ) -> None:
        self._rules, self._members, self._announcer = rules, members, announcer
        self._rates = Rates(rates)
        self._next_plan = tag << TAG_SHIFT
        self._last_plan: Plan | None = None  # of the version before

    def joined(self, peer: Peer) -> None:
        """What is known of it."""
        peer.uplink, peer.pace = self._rates.uplink(peer.peer), self._rates.pace(peer.peer)

    def measured(
        self, transmission: Transmission, peer: PeerId, message: TransferReport, now: float
    ) -> None:
        """What the peer got from others, and for how long they took less of it than there was."""
        transmission.moved(now)
        if transmission.expected_bytes < MEASURED_BYTES_MIN:
            return
        for sample in message.links:
            if 0 <= sample.seconds < math.inf:
                self._rates.received(
                    sample.peer, peer, sample.payload_bytes, sample.seconds, now=now
                )
        for backlog in message.backlogs:
            if 0 <= backlog.seconds < math.inf:
                self._rates.backlogged(peer, backlog.peer, backlog.seconds)

    def plan(
        self, transmission: Transmission, seed: Peer, takers: Sequence[Peer]
    ) -> list[BroadcastAction]:
        """Everybody gets a plan by the rates that the last one has shown."""
        actions = self._judge(seed)
        edges = transmission.make_plan(
            self._new_id(), self._rules, seed, takers, transmission.plan or self._last_plan
        )
        self._rates.begin({} if transmission.plan is None else transmission.plan.shares)
        return [*actions, *self._announcer.edges(edges)]

    def plan_aside(
        self, transmission: Transmission, seed: Peer, takers: Sequence[Peer]
    ) -> list[BroadcastAction]:
        """For a few peers, by what is known anyway; nothing is measured."""
        return self._announcer.edges(
            transmission.make_plan(self._new_id(), self._rules, seed, takers)
        )

    def learn(self, transmission: Transmission, takers: Sequence[Peer]) -> list[BroadcastAction]:
        """The first bytes have shown what was guessed. After another plan only gaps are filled, which shows nothing."""
        seed = self._members.seed
        if seed is None:
            transmission.learn_at = math.inf
            return []
        actions = self._judge(seed)
        edges = transmission.learn(self._new_id(), self._rules, seed, takers)
        if not edges and transmission.plan is not None:
            self._rates.begin(transmission.plan.shares)
        return [*actions, *self._announcer.edges(edges)]

    def ended(self, transmission: Transmission) -> None:
        """Another version spreads: this one's trees may suit it."""
        self._last_plan = transmission.plan or self._last_plan

    def _judge(self, seed: Peer) -> list[BroadcastAction]:
        """The rates by all that was reported so far."""
        changed = self._rates.judge()
        receivers = self._members.receivers()
        rates = self._rates.to_plan_with(seed.peer, [peer.peer for peer in receivers])
        for peer in (seed, *receivers):
            peer.uplink, peer.pace = rates.get(peer.peer), self._rates.pace(peer.peer)
        return [Persist(RatesMeasured(changed))] if changed else []

    def _new_id(self) -> PlanId:
        self._next_plan += 1
        return PlanId(self._next_plan - 1)

    def check(self) -> None:
        self._rates.check()
