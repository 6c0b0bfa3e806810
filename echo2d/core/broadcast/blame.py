"""Decides which of two peers is at fault when an edge breaks or a frame is bad, and makes it a leaf.

A leaf receives and passes nothing on, so that its fault harms no other peer. The seed is never at
fault. Only reports about a neighbour in the plan count; others are misreports, which lead to quarantine.
Not here: who is quarantined (`cluster.quarantine`), and how a plan is repaired (`transmission`).
"""

from collections.abc import Iterable

from echo2d.core.base.ids import PeerId
from echo2d.core.broadcast.announcer import Announcer
from echo2d.core.broadcast.events import BroadcastAction
from echo2d.core.broadcast.timing import BroadcastTimings
from echo2d.core.broadcast.transmission import Transmission
from echo2d.core.cluster.membership import Membership
from echo2d.core.cluster.peer import Peer
from echo2d.core.cluster.statistics import Statistics
from echo2d.core.protocol.control_messages import EdgeBroken, FrameAccused


class Blame:
    """See the module docstring. `now` is monotonic seconds."""

    def __init__(
        self,
        *,
        members: Membership,
        statistics: Statistics,
        announcer: Announcer,
        timings: BroadcastTimings,
    ) -> None:
        self._members, self._statistics = members, statistics
        self._announcer, self._timings = announcer, timings

    def edge_broken(
        self, transmissions: Iterable[Transmission], peer: Peer, message: EdgeBroken
    ) -> list[BroadcastAction]:
        """The peer at the other end becomes a leaf; if the seed is at the other end, the reporter does."""
        plans = [(each, each.plan) for each in transmissions if each.plan is not None]
        transmission, plan = next(
            (each for each in plans if each[1].plan_id == message.plan), (None, None)
        )
        if transmission is None or plan is None:
            return []
        note = self._statistics.fault(
            "edge", f"{peer.name} and {self._name(message.peer)}: {message.reason}"
        )
        # The plan may have been repaired meanwhile, or this is not one of the peer's edges.
        if plan.generation != message.generation:
            return [note]
        if message.peer not in transmission.neighbours(peer.peer):
            self._members.misreported(peer, now=self._statistics.now)
            return [note]
        at_fault = peer.peer if message.peer == plan.root else message.peer
        return [note, *self._announcer.edges(transmission.make_leaf(at_fault))]

    def frame_accused(
        self, transmission: Transmission | None, peer: Peer, message: FrameAccused, *, now: float
    ) -> list[BroadcastAction]:
        """One of the two peers is at fault and becomes a leaf for good.

        transmission: the one that sends the frame's form; None: it has ended.
        """
        note = self._statistics.fault(
            "frame", f"{peer.name} accuses {self._name(message.accused)}: {message.frame}"
        )
        accused = self._members.get(message.accused)
        if (
            transmission is None
            or accused is None
            or not transmission.may_accuse(peer.peer, accused.peer)
        ):
            self._members.misreported(peer, now=now)
            return [note]
        at_fault = (
            peer.peer if accused.kind == "seed" else self._members.accuse(peer, accused, now=now)
        )
        if accused.reach.quarantined:
            self._timings.lost(accused.peer)
        return [note, *self._announcer.edges(transmission.make_leaf(at_fault, for_good=True))]

    def _name(self, peer: PeerId) -> str:
        known = self._members.get(peer)
        return str(peer) if known is None else known.name
