"""Derives each peer's part of a plan: its parents and children, and which peers it dials."""

from collections.abc import Callable

from blake3 import blake3

from echo2d.core.base.ids import PeerId, StripeId
from echo2d.core.protocol.control_messages import EdgePeer, PlanEdges, StripeEdge
from echo2d.core.topology.plan import SMALL_SWARM, PeerFacts, Plan


def changed_peers(old: Plan, new: Plan) -> set[PeerId]:
    """The peers of the new plan whose edges differ from the old plan."""
    changed: set[PeerId] = set()
    for before, after in zip(old.stripes, new.stripes, strict=True):
        one, other = set(before.tree.parents.items()), set(after.tree.parents.items())
        changed.update(peer for edge in one ^ other for peer in edge)
    changed.update(peer for edge in _supply(old).keys() ^ _supply(new).keys() for peer in edge)
    return changed & set(new.facts())


def edges_for(plan: Plan, peer: PeerId, secret: Callable[[PeerId, PeerId], bytes]) -> PlanEdges:
    """This peer's part of the plan. secret: called with the two ids of an edge in ascending order."""
    facts = plan.facts()
    others = dict.fromkeys(
        other for pair in _supply(plan) if peer in pair for other in pair if other != peer
    )
    is_large = len(plan.peers) - 1 > SMALL_SWARM
    stripes = []
    for number, stripe in enumerate(plan.stripes):
        parent, children = stripe.tree.parents.get(peer), stripe.tree.children(peer)
        weight = stripe.weight if is_large else 0.0
        stripes.append(StripeEdge(StripeId(number), parent, children, stripe.spare, weight))
        others |= dict.fromkeys(children if parent is None else (*children, parent))
    peers = tuple(_edge_peer(facts[peer], facts[other], plan, secret) for other in others)
    sources = plan.sources.get(peer, ())
    return PlanEdges(plan.form, plan.plan_id, plan.generation, tuple(stripes), peers, sources)


def _supply(plan: Plan) -> dict[tuple[PeerId, PeerId], None]:
    """The pairs (newcomer, source), in order."""
    return {(peer, source): None for peer, sources in plan.sources.items() for source in sources}


def _edge_peer(
    me: PeerFacts,
    other: PeerFacts,
    plan: Plan,
    secret: Callable[[PeerId, PeerId], bytes],
) -> EdgePeer:
    dials = _dialler(me, other, plan) == me.peer
    pair = sorted((me.peer, other.peer))
    return EdgePeer(other.peer, other.address if dials else None, dials, secret(pair[0], pair[1]))


def _dialler(one: PeerFacts, other: PeerFacts, plan: Plan) -> PeerId:
    """Which of two peers dials: the child if possible. If each is a parent of the other, the peer
    with the smaller id dials.
    """
    if one.address is None or other.address is None:
        return one.peer if one.address is None else other.peer
    above = (one.peer, other.peer) in plan.shares
    if above == ((other.peer, one.peer) in plan.shares):
        return min(one.peer, other.peer)
    return other.peer if above else one.peer


def edge_secret(plan_secret: bytes, one: PeerId, other: PeerId) -> bytes:
    """The secret of one edge: 32 bytes that can be derived only with the plan's secret."""
    return blake3(f"{one} {other}".encode(), key=plan_secret).digest()
