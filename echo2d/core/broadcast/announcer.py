"""Makes the messages about one version: orders for the seed, roots and edges for all peers.

Not here: any decision (`publishing`, `catch_up`).
"""

from collections.abc import Collection, Iterable, Mapping

from echo2d.core.base.ids import PeerId
from echo2d.core.broadcast.events import BroadcastAction, SendRoot
from echo2d.core.broadcast.transmission import Transmission
from echo2d.core.cluster.events import Send
from echo2d.core.cluster.membership import Membership
from echo2d.core.cluster.peer import Peer
from echo2d.core.protocol.control_messages import ForgetForm, PlanEdges
from echo2d.core.topology.edges import edge_secret
from echo2d.core.weights.signed_index import Root


class Announcer:
    """Makes messages for peers with a session; other peers get everything when they say hello."""

    def __init__(self, members: Membership, plan_secret: bytes) -> None:
        self._members, self._plan_secret = members, plan_secret

    def secret(self, one: PeerId, other: PeerId) -> bytes:
        """The secret that authenticates the edge between two peers."""
        return edge_secret(self._plan_secret, one, other)

    def order(self, transmission: Transmission, *, aside: bool) -> list[BroadcastAction]:
        """Order the seed to encode this form. aside: it is a catch-up, to be encoded after the spreading form."""
        transmission.encode_at = None
        seed = self._members.seed
        if seed is None or seed.session is None:
            return []
        return [Send(seed.session, transmission.order(aside=aside))]

    def root(self, peers: Collection[Peer], root: Root) -> list[BroadcastAction]:
        sessions = tuple(peer.session for peer in peers if peer.session is not None)
        return [SendRoot(sessions, root.signing_bytes())] if sessions else []

    def place(
        self, transmission: Transmission, peer: Peer, *, renewed: bool
    ) -> list[BroadcastAction]:
        """Send a peer the newest root and its edges; nothing if there is no root yet."""
        if transmission.newest_root is None:
            return []
        return [
            *self.root([peer], transmission.newest_root),
            *self.edges(transmission.admit(peer, renewed=renewed)),
        ]

    def edges(self, edges: Mapping[PeerId, PlanEdges]) -> list[BroadcastAction]:
        known = [(self._members.get(peer), part) for peer, part in edges.items()]
        return [
            Send(peer.session, part)
            for peer, part in known
            if peer is not None and peer.session is not None
        ]

    def forget(self, transmission: Transmission, peers: Iterable[Peer]) -> list[BroadcastAction]:
        sessions = [peer.session for peer in peers if peer.session is not None]
        return [Send(session, ForgetForm(transmission.form)) for session in sessions]
