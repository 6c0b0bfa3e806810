"""Counts the bytes of versions that each peer has received and passed on, since the coordinator started.

    receiver --TransferReport: what came over each link--> received of the receiver, sent of the sender

A receiver can lie, so what it reports of one form counts up to FORM_COPIES_MAX times the form's size.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from echo2d.core.base.bounded_dict import keep_newest
from echo2d.core.base.ids import PeerId
from echo2d.core.cluster.membership import PEERS_MAX
from echo2d.core.protocol.control_messages import LinkSample

# Frames come twice where a link broke; a whole form that comes again has another number.
FORM_COPIES_MAX = 2


@dataclass(slots=True)
class PeerTraffic:
    """Payload bytes."""

    received: int = 0
    sent: int = 0


NO_TRAFFIC = PeerTraffic()


class Traffic:
    """See the module docstring. peers: those of which something was reported; read only."""

    def __init__(self) -> None:
        self.peers: dict[PeerId, PeerTraffic] = {}

    def count(self, receiver: PeerId, links: Iterable[LinkSample], *, left: int) -> int:
        """Count what came over these links, `left` bytes at most. Returns how many were counted."""
        counted = 0
        for link in links:
            part = max(0, min(link.payload_bytes, left - counted))
            if part:
                self._peer(receiver).received += part
                self._peer(link.peer).sent += part
                counted += part
        keep_newest(self.peers, PEERS_MAX)
        return counted

    def _peer(self, peer: PeerId) -> PeerTraffic:
        return self.peers.setdefault(peer, PeerTraffic())

    def check(self) -> None:
        assert len(self.peers) <= PEERS_MAX
