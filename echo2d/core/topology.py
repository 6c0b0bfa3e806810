"""Plans: over which trees a form spreads from its root to all peers, how long that should take, and how to mend it.

A plan holds weights and trees, not frames. It is immutable: `repair` and `join` make the next generation, in which only
the edges around the peer that left or came are different. Two peers that nobody can dial never share an edge.

Cost model, in seconds, for B bytes in frames of f bytes: every peer sends its children their share of B over its uplink
and receives B over its downlink, all at the same time; to the slowest of these comes the start-up of the deepest tree,
a frame per child and hop.

Not here: measuring rates (`rates`), when to plan or repair (the coordinator), which frames go where (`stripes`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

from blake3 import blake3

from echo2d.core.ids import FormId, Generation, PeerId, PlanId, StripeId
from echo2d.core.messages import Address, EdgePeer, PlanEdges, StripeEdge

Shape = Literal["star", "chain"]

STRIPES_MAX = 16  # chains of one plan: more only divide the lanes
RATE_GUESS = 12.5e6  # bytes/s of a link of which nothing is known: 100 Mbit/s
SLOW_SHARE = 0.5  # a peer with less than this share of the median uplink passes nothing on at first


@dataclass(frozen=True, slots=True)
class PeerFacts:
    """What is known of a peer. Rates in bytes/s, None: not measured. address: None if nobody can dial it."""

    peer: PeerId
    uplink: float | None
    downlink: float | None
    address: Address | None


@dataclass(frozen=True, slots=True)
class Tree:
    """A tree over all peers: parent of every peer but the root. Not to be changed."""

    root: PeerId
    parents: Mapping[PeerId, PeerId]

    def children(self, peer: PeerId) -> tuple[PeerId, ...]:
        return tuple(child for child, parent in self.parents.items() if parent == peer)

    def depths(self) -> dict[PeerId, int]:
        """Hops from the root; peers that no path reaches are left out."""
        below: dict[PeerId, list[PeerId]] = {}
        for child, parent in self.parents.items():
            below.setdefault(parent, []).append(child)
        depths = {self.root: 0}
        edge = [self.root]
        while edge:
            peer = edge.pop()
            for child in below.get(peer, ()):
                depths[child] = depths[peer] + 1
                edge.append(child)
        return depths


@dataclass(frozen=True, slots=True)
class Stripe:
    """A share `weight` of the frames, and the tree they take. The weights of a plan add up to 1."""

    weight: float
    tree: Tree


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be spread: estimated bytes on the wire, and bytes per frame."""

    form: FormId
    wire_bytes: int
    frame_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """peers[0] is the root. predicted_s, bound_s: T_verify by the cost model, and no plan can be faster."""

    plan_id: PlanId
    generation: Generation
    job: Job
    shape: Shape
    peers: tuple[PeerFacts, ...]
    stripes: tuple[Stripe, ...]
    predicted_s: float
    bound_s: float

    @property
    def form(self) -> FormId:
        return self.job.form

    @property
    def root(self) -> PeerId:
        return self.peers[0].peer

    def facts(self) -> dict[PeerId, PeerFacts]:
        return {facts.peer: facts for facts in self.peers}

    def check(self) -> None:
        """Every stripe reaches every peer once, without a cycle, over edges of which one end can be dialled."""
        facts = self.facts()
        assert len(facts) == len(self.peers)
        assert abs(sum(stripe.weight for stripe in self.stripes) - 1.0) < 1e-9
        for stripe in self.stripes:
            assert stripe.tree.root == self.root
            assert set(stripe.tree.parents) == set(facts) - {self.root}
            assert set(stripe.tree.depths()) == set(facts)
            assert all(_linkable(facts[child], facts[parent]) for child, parent in stripe.tree.parents.items())


def assume_usual(peers: Sequence[PeerFacts]) -> list[PeerFacts]:
    """Peers whose uplink was never measured count as the median of those whose was."""
    measured = [facts.uplink for facts in peers if facts.uplink is not None]
    usual = median(measured) if measured else None
    return [replace(facts, uplink=usual) if facts.uplink is None else facts for facts in peers]


# --- shapes ----------------------------------------


def plan_star(plan_id: PlanId, job: Job, seed: PeerFacts, peers: Sequence[PeerFacts]) -> Plan:
    """One stripe, straight from the seed, which can be dialled, to everyone."""
    tree = Tree(seed.peer, {facts.peer: seed.peer for facts in peers})
    return _plan(plan_id, job, "star", (seed, *peers), (Stripe(1.0, tree),))


def plan_chains(plan_id: PlanId, job: Job, seed: PeerFacts, peers: Sequence[PeerFacts], chains: int) -> Plan:
    """Equal stripes, each a chain over the fast peers in another rotation, with the slow ones hung on as leaves."""
    assert 1 <= chains <= STRIPES_MAX
    usual = median(_uplink(facts) for facts in peers) if peers else 0.0
    fast = sorted((facts for facts in peers if _uplink(facts) >= SLOW_SHARE * usual), key=_rank)
    order, rest = _alternate(fast)
    slow = sorted((facts for facts in peers if _uplink(facts) < SLOW_SHARE * usual), key=_rank)
    count = max(1, min(chains, len(order)))
    trees = [Tree(seed.peer, _chain(seed, _rotated(order, index, count))) for index in range(count)]
    plan = _plan(plan_id, job, "chain", (seed, *order), tuple(Stripe(1 / count, tree) for tree in trees))
    for facts in (*rest, *slow):
        plan = _with_leaf(plan, facts)
    return _plan(plan_id, job, "chain", plan.peers, plan.stripes)


def _rank(facts: PeerFacts) -> int:
    """Faster peers first, in steps of two: a chain whose order follows every measurement loses its links each time."""
    return -round(math.log2(_uplink(facts)))


def plan_auto(plan_id: PlanId, job: Job, seed: PeerFacts, peers: Sequence[PeerFacts], chains: int) -> Plan:
    """Star or chains, whichever should be done first."""
    plans = (plan_star(plan_id, job, seed, peers), plan_chains(plan_id, job, seed, peers, chains))
    return min(plans, key=lambda plan: plan.predicted_s)


def _plan(plan_id: PlanId, job: Job, shape: Shape, peers: tuple[PeerFacts, ...], stripes: tuple[Stripe, ...]) -> Plan:
    assert peers[0].address is not None
    predicted = _predict(job, peers, stripes)
    return Plan(plan_id, Generation(0), job, shape, peers, stripes, predicted, bound_s(job, peers[0], peers[1:]))


def _alternate(peers: Sequence[PeerFacts]) -> tuple[list[PeerFacts], list[PeerFacts]]:
    """An order, of any rotation of which no two neighbours are both undiallable, and the peers that do not fit in."""
    open_, closed = [p for p in peers if p.address is not None], [p for p in peers if p.address is None]
    order: list[PeerFacts] = []
    for index, facts in enumerate(open_):
        order.append(facts)
        if index < len(closed):
            order.append(closed[index])
    return (order, closed[len(open_) :]) if open_ else (list(closed[:1]), list(closed[1:]))


def _rotated(order: list[PeerFacts], index: int, count: int) -> list[PeerFacts]:
    start = index * len(order) // count
    return order[start:] + order[:start]


def _chain(seed: PeerFacts, order: Sequence[PeerFacts]) -> dict[PeerId, PeerId]:
    before = (seed, *order)
    return {facts.peer: parent.peer for parent, facts in zip(before, order, strict=False)}


# --- changes ----------------------------------------


def repair(plan: Plan, lost: PeerId) -> Plan:
    """The next generation without this peer: its children move up to its parent. Not for the root."""
    assert lost != plan.root
    facts = plan.facts()
    stripes = tuple(replace(stripe, tree=_without(stripe.tree, lost, facts)) for stripe in plan.stripes)
    peers = tuple(one for one in plan.peers if one.peer != lost)
    return replace(plan, generation=Generation(plan.generation + 1), peers=peers, stripes=stripes)


def join(plan: Plan, newcomer: PeerFacts) -> Plan:
    """The next generation with this peer as a leaf of the peers that have the most uplink to spare."""
    plan = _with_leaf(plan, newcomer)
    return replace(plan, generation=Generation(plan.generation + 1))


def _without(tree: Tree, lost: PeerId, facts: Mapping[PeerId, PeerFacts]) -> Tree:
    parents = {child: parent for child, parent in tree.parents.items() if child != lost}
    for orphan in tree.children(lost):
        parent = tree.parents[lost]
        while not _linkable(facts[orphan], facts[parent]) and parent != tree.root:
            parent = tree.parents[parent]
        parents[orphan] = parent
    return Tree(tree.root, parents)


def _with_leaf(plan: Plan, newcomer: PeerFacts) -> Plan:
    assert newcomer.peer not in plan.facts()
    load = _loads(plan.stripes)
    stripes = []
    for stripe in plan.stripes:
        parent = _best_parent(plan, stripe, newcomer, load)
        load[parent] = load.get(parent, 0.0) + stripe.weight
        stripes.append(replace(stripe, tree=Tree(plan.root, {**stripe.tree.parents, newcomer.peer: parent})))
    return replace(plan, peers=(*plan.peers, newcomer), stripes=tuple(stripes))


def _best_parent(plan: Plan, stripe: Stripe, newcomer: PeerFacts, load: Mapping[PeerId, float]) -> PeerId:
    """In a star the root; in a chain whoever is done soonest with one more child, the root only if nobody else can."""
    able = [facts for facts in plan.peers[1:] if _linkable(facts, newcomer)]
    if plan.shape == "star" or not able:
        return plan.root
    depths = stripe.tree.depths()
    return min(able, key=lambda one: ((load.get(one.peer, 0.0) + stripe.weight) / _uplink(one), depths[one.peer])).peer


# --- cost ----------------------------------------


def bound_s(job: Job, seed: PeerFacts, peers: Sequence[PeerFacts]) -> float:
    """T* = max(B/u_s, B/min d_i, N*B/(u_s + sum u_i)): the fluid limit of any way to spread B bytes."""
    if not peers:
        return 0.0
    slowest = min(_downlink(facts) for facts in peers)
    together = _uplink(seed) + sum(_uplink(facts) for facts in peers)
    return job.wire_bytes * max(1 / _uplink(seed), 1 / slowest, len(peers) / together)


def _predict(job: Job, peers: tuple[PeerFacts, ...], stripes: tuple[Stripe, ...]) -> float:
    uplinks = {facts.peer: _uplink(facts) for facts in peers}
    sending = max((load / uplinks[peer] for peer, load in _loads(stripes).items()), default=0.0)
    receiving = max((1 / _downlink(facts) for facts in peers[1:]), default=0.0)
    start = max(_start_s(job, stripe.tree, uplinks) for stripe in stripes)
    return job.wire_bytes * max(sending, receiving) + start


def _loads(stripes: Sequence[Stripe]) -> dict[PeerId, float]:
    """How many times the whole form each peer sends."""
    load: dict[PeerId, float] = {}
    for stripe in stripes:
        for parent in stripe.tree.parents.values():
            load[parent] = load.get(parent, 0.0) + stripe.weight
    return load


def _start_s(job: Job, tree: Tree, uplinks: Mapping[PeerId, float]) -> float:
    """Until a frame has come down the longest way, every hop but the last waiting for all children of its sender."""
    children: dict[PeerId, int] = {}
    for parent in tree.parents.values():
        children[parent] = children.get(parent, 0) + 1
    depths = tree.depths()
    start = {tree.root: 0.0}
    for peer in sorted(tree.parents, key=lambda one: depths[one]):
        parent = tree.parents[peer]
        start[peer] = start[parent] + children[parent] * job.frame_bytes / uplinks[parent]
    return max(start.values())


def _uplink(facts: PeerFacts) -> float:
    return RATE_GUESS if facts.uplink is None else facts.uplink


def _downlink(facts: PeerFacts) -> float:
    return RATE_GUESS if facts.downlink is None else facts.downlink


def _linkable(one: PeerFacts, other: PeerFacts) -> bool:
    return one.address is not None or other.address is not None


# --- what each peer is told ----------------------------------------


def changed_peers(old: Plan, new: Plan) -> set[PeerId]:
    """The peers of the new plan whose edges differ."""
    changed: set[PeerId] = set()
    for before, after in zip(old.stripes, new.stripes, strict=True):
        one, other = set(before.tree.parents.items()), set(after.tree.parents.items())
        changed.update(peer for edge in one ^ other for peer in edge)
    return changed & set(new.facts())


def edges_for(plan: Plan, peer: PeerId, secret: Callable[[PeerId, PeerId], bytes]) -> PlanEdges:
    """What this peer is told of the plan. secret(one, other) is called with the ids in order. The child dials."""
    facts = plan.facts()
    stripes, others = [], {}
    for number, stripe in enumerate(plan.stripes):
        parent, children = stripe.tree.parents.get(peer), stripe.tree.children(peer)
        stripes.append(StripeEdge(StripeId(number), stripe.weight, parent, children))
        others.update(dict.fromkeys(children))
        if parent is not None:
            others[parent] = None
    peers = tuple(_edge_peer(facts[peer], facts[other], plan, secret) for other in others)
    return PlanEdges(plan.form, plan.plan_id, plan.generation, tuple(stripes), peers)


def _edge_peer(me: PeerFacts, other: PeerFacts, plan: Plan, secret: Callable[[PeerId, PeerId], bytes]) -> EdgePeer:
    dials = _dialler(me, other, plan) == me.peer
    pair = sorted((me.peer, other.peer))
    return EdgePeer(other.peer, other.address if dials else None, dials, secret(pair[0], pair[1]))


def _dialler(one: PeerFacts, other: PeerFacts, plan: Plan) -> PeerId:
    """The child dials the parent if it can; where each is the other's parent, the one with the smaller id does."""
    if one.address is None or other.address is None:
        return one.peer if one.address is None else other.peer
    child_of = [stripe.tree.parents for stripe in plan.stripes]
    above = any(parents.get(other.peer) == one.peer for parents in child_of)
    below = any(parents.get(one.peer) == other.peer for parents in child_of)
    if above == below:
        return min(one.peer, other.peer)
    return other.peer if above else one.peer


def edge_secret(plan_secret: bytes, one: PeerId, other: PeerId) -> bytes:
    """The secret of one edge: 32 bytes that only holders of the plan's 32-byte secret can make."""
    return blake3(f"{one} {other}".encode(), key=plan_secret).digest()
