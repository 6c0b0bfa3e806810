"""Checks a peer's part of a plan before its relay follows it.

Not here: whether the plan is a good one, and who made it (the other end of the control link proved
that it holds the run's key).
"""

from collections import Counter

from echo2d.core.base.ids import PeerId
from echo2d.core.protocol.addresses import is_dialable
from echo2d.core.protocol.control_messages import EdgePeer, PlanEdges, StripeEdge
from echo2d.core.protocol.peer_handshake import SECRET_BYTES
from echo2d.core.topology.plan import STRIPES_MAX


def edges_fault(edges: PlanEdges, me: PeerId) -> str:
    """What is wrong with these edges of the peer `me`; empty when they can be followed."""
    peers = {edge.peer for edge in edges.peers}
    if (
        len(edges.stripes) > STRIPES_MAX
        or max(Counter(edge.stripe for edge in edges.stripes).values(), default=1) > 1
    ):
        return "its stripes are too many or the same"
    if len(peers) != len(edges.peers) or me in peers or not all(map(_is_edge, edges.peers)):
        return "a peer in it cannot be linked with"
    # A peer without a parent is the root, and a root begins every stripe of its plan.
    if len({edge.parent is None for edge in edges.stripes}) > 1:
        return "it begins here for some stripes only"
    if not peers.issuperset(edges.sources):
        return "a source in it is no peer of it"
    return (
        ""
        if all(_is_place(edge, peers) for edge in edges.stripes)
        else "a stripe's edges are impossible"
    )


def _is_edge(edge: EdgePeer) -> bool:
    # An edge needs an address only at the end that dials.
    reachable = is_dialable(edge.address) if edge.address is not None else not edge.dial
    return reachable and len(edge.secret) == SECRET_BYTES


def _is_place(edge: StripeEdge, peers: set[PeerId]) -> bool:
    others = edge.children if edge.parent is None else (edge.parent, *edge.children)
    shares = 0.0 <= edge.spare <= 1.0 and 0.0 <= edge.weight <= 1.0
    return shares and len(set(others)) == len(others) and peers.issuperset(others)
