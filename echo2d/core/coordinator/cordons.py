"""Takes workers out of service, and ends them, as an operator orders it.

    in service --cordon--> cordoned --uncordon--> in service
        |                     |
        +----- drain ---------+--> draining --holds nothing--> told to end --> gone, and cordoned

A cordoned worker gets no new leases, finishes those that it holds, and still receives versions and
passes them on. It stays cordoned until `uncordon`, also when it comes back or the coordinator
restarts: the access table keeps that. A drain ends when the coordinator or the worker's daemon
restarts. So a box whose service manager restarts the daemon stays idle, instead of being ended over
and over.
Not here: which workers replace it (`activation_loop`), and what the worker does when it is told to end.
"""

from collections.abc import Sequence

from echo2d.core.base.ids import PeerId
from echo2d.core.cluster.events import Note, Reply, Send
from echo2d.core.cluster.membership import Membership
from echo2d.core.cluster.peer import Peer
from echo2d.core.coordinator.events import CoordinatorAction, WorkerOrdered
from echo2d.core.protocol.control_messages import Drain
from echo2d.core.work.scheduler import LeaseScheduler


class Cordons:
    """See the module docstring."""

    def __init__(self, members: Membership, scheduler: LeaseScheduler) -> None:
        self._members, self._scheduler = members, scheduler
        # The workers to end once they hold nothing.
        self._draining: set[PeerId] = set()

    def ordered(self, event: WorkerOrdered) -> list[CoordinatorAction]:
        """Perform an operator's order about one worker. A repeated order gets the same answer."""
        peer = self._members.get(event.peer)
        if peer is None or peer.kind not in ("worker", "relay"):
            # The access table has the order, so the worker is cordoned when it connects.
            return [Reply(event.request, 200, {"id": event.peer, "connected": False, "leased": 0})]
        before = (peer.service.cordoned, peer.service.draining)
        drains = event.order == "drain"
        peer.service.cordoned = event.order != "uncordon"
        # A drain is called off by `uncordon`, but not by an order to cordon the worker.
        peer.service.draining = peer.service.cordoned and (
            peer.service.draining or (drains and peer.state != "gone")
        )
        (self._draining.add if peer.service.draining else self._draining.discard)(peer.peer)
        self._members.changed.add(peer.peer)
        note = Note(event.order, f"{peer.name}: it holds {self._scheduler.load(peer.peer)} samples")
        return [
            *([note] if before != (peer.service.cordoned, peer.service.draining) else []),
            self._reply(event, peer),
        ]

    def advance(self) -> Sequence[CoordinatorAction]:
        """Tell draining workers that hold nothing to end."""
        actions: list[CoordinatorAction] = []
        for key in sorted(self._draining):
            peer = self._members.get(key)
            if peer is None or not peer.service.draining or peer.state == "gone":
                self._draining.discard(key)
            elif peer.session is not None and not self._scheduler.load(key):
                # If the link breaks before this arrives, it is sent again after the next hello.
                self._draining.discard(key)
                actions.append(Send(peer.session, Drain("the operator drains this worker")))
        return actions

    def joined(self, peer: Peer) -> None:
        """A peer said hello. If it is still draining, it must be told to end (again)."""
        if peer.service.draining:
            self._draining.add(peer.peer)

    def _reply(self, event: WorkerOrdered, peer: Peer) -> Reply:
        leased = self._scheduler.load(peer.peer)
        connected = peer.state != "gone"
        return Reply(
            event.request, 200, {"id": peer.peer, "connected": connected, "leased": leased}
        )

    def check(self) -> None:
        assert all(
            peer.service.draining
            for key in self._draining
            if (peer := self._members.get(key)) is not None
        )
