"""The next generation of a plan: a peer has left, or has come. Only the edges around it become different.

Not here: when to mend (the coordinator), and plans from scratch (`planner`).
"""

from collections.abc import Collection, Mapping
from dataclasses import replace

from echo2d.core.base.ids import Generation, PeerId
from echo2d.core.topology.cost_model import fill_in, uplink
from echo2d.core.topology.plan import STAR, PeerFacts, Plan, Stripe, Tree, linkable

SOURCES_MAX = 8  # peers that a newcomer fetches from: fill a downlink of eight times their uplink


def repair(plan: Plan, lost: PeerId) -> Plan:
    """The next generation without this peer: of its children one takes its place, the others go where uplink is spare.

    Not for the root.
    """
    assert lost != plan.root
    left = _Spare(plan, lost)
    stripes = tuple(replace(stripe, tree=left.without(stripe, lost)) for stripe in plan.stripes)
    peers = tuple(one for one in plan.peers if one.peer != lost)
    sources = {
        one: tuple(peer for peer in of if peer != lost)
        for one, of in plan.sources.items()
        if one != lost
    }
    return replace(
        plan,
        generation=Generation(plan.generation + 1),
        peers=peers,
        stripes=stripes,
        joined=plan.joined - {lost},
        sources=sources,
    )


def join(plan: Plan, newcomer: PeerFacts, holders: Collection[PeerId] = ()) -> Plan:
    """The next generation with this peer as a leaf of the peers that have the most uplink to spare.

    holders: who holds the whole form; if their uplinks are no less than the plan's rate, these are its sources.
    """
    plan = with_leaf(plan, newcomer, holders)
    return replace(
        plan, generation=Generation(plan.generation + 1), joined=plan.joined | {newcomer.peer}
    )


def with_leaf(plan: Plan, newcomer: PeerFacts, holders: Collection[PeerId] = ()) -> Plan:
    """The same plan and this peer, in no stripe above another."""
    assert newcomer.peer not in plan.facts()
    plan = replace(plan, peers=(*plan.peers, newcomer))
    spare = _Spare(plan, newcomer.peer, holders)
    sources = spare.sources(newcomer.peer)
    stripes = tuple(
        replace(stripe, tree=spare.with_leaf(stripe, newcomer.peer)) for stripe in plan.stripes
    )
    return replace(
        plan,
        stripes=stripes,
        sources={**plan.sources, newcomer.peer: sources} if sources else plan.sources,
    )


class _Spare:
    """Who could send how much more. Counts what it gives away. holders: those who hold the whole form."""

    def __init__(self, plan: Plan, changing: PeerId, holders: Collection[PeerId] = ()) -> None:
        self._shape = plan.shape
        self._root = plan.root
        self._joined = plan.joined
        self._facts: Mapping[PeerId, PeerFacts] = {one.peer: one for one in fill_in(plan.peers)}
        self._load = _left_to_send(plan, holders)
        self._able = {
            peer
            for peer, one in self._facts.items()
            if peer not in (changing, plan.root) and uplink(one)
        }
        self._holders = self._able.intersection(holders)
        if sum(map(self._spare, self._holders)) < plan.job.wire_bytes / max(plan.predicted_s, 1e-9):
            self._holders = set()  # too few: the stripes are faster

    def with_leaf(self, stripe: Stripe, peer: PeerId) -> Tree:
        parents = dict(stripe.tree.parents)
        self._place(parents, stripe, peer, self._able)
        return Tree(self._root, parents)

    def sources(self, peer: PeerId) -> tuple[PeerId, ...]:
        """The holders with most uplink to spare."""
        able = [one for one in self._holders if linkable(self._facts[one], self._facts[peer])]
        return tuple(sorted(able, key=lambda one: (-self._spare(one), one))[:SOURCES_MAX])

    def _spare(self, peer: PeerId) -> float:
        """Bytes/s that one more receiver gets of it."""
        return uplink(self._facts[peer]) / (1 + self._load.get(peer, 0.0))

    def without(self, stripe: Stripe, lost: PeerId) -> Tree:
        """Nobody is put below itself: an orphan's own tree is no place for it."""
        tree = stripe.tree
        parents = {child: parent for child, parent in tree.parents.items() if child != lost}
        orphans = sorted(tree.children(lost), key=lambda one: self._busy(one, stripe.weight))
        below = {orphan: set(Tree(orphan, parents).downwards()) for orphan in orphans}
        loose = {peer for peers in below.values() for peer in peers}
        for number, orphan in enumerate(orphans):
            if number == 0:
                parents[orphan] = self._above(tree, orphan, lost)
                self._load[parents[orphan]] = self._load.get(parents[orphan], 0.0) + stripe.weight
            else:
                self._place(parents, stripe, orphan, self._able - loose)
            loose -= below[orphan]
        return Tree(self._root, parents)

    def _above(self, tree: Tree, orphan: PeerId, lost: PeerId) -> PeerId:
        parent = tree.parents[lost]
        while not linkable(self._facts[orphan], self._facts[parent]) and parent != tree.root:
            parent = tree.parents[parent]
        return parent

    def _place(
        self, parents: dict[PeerId, PeerId], stripe: Stripe, peer: PeerId, able: set[PeerId]
    ) -> None:
        """Below whoever is done soonest with one more child: of the holders, of all but in a star, or the root.

        Peers that have joined come last: they are far behind, or were found wanting, though nobody has more to spare.
        """
        able = {
            one for one in able if one != peer and linkable(self._facts[one], self._facts[peer])
        }
        parent = self._root
        able = self._holders & able or able if self._shape != STAR else self._holders & able
        if able:
            depths = stripe.tree.depths()
            joined, weight = self._joined, stripe.weight
            parent = min(
                able,
                key=lambda one: (one in joined, self._busy(one, weight), depths.get(one, 0), one),
            )
        parents[peer] = parent
        self._load[parent] = self._load.get(parent, 0.0) + stripe.weight

    def _busy(self, peer: PeerId, more: float) -> float:
        """Forms to send per byte/s of uplink, with so much more."""
        rate = uplink(self._facts[peer])
        return (self._load.get(peer, 0.0) + more) / rate if rate else float("inf")


def _left_to_send(plan: Plan, holders: Collection[PeerId]) -> dict[PeerId, float]:
    """How many times the whole form each peer has still to send: holders get no more."""
    edges = [
        (parent, each.weight)
        for each in plan.stripes
        for peer, parent in each.tree.parents.items()
        if peer not in holders
    ]
    edges += [
        (one, 1 / len(of)) for peer, of in plan.sources.items() if peer not in holders for one in of
    ]
    load: dict[PeerId, float] = {}
    for parent, weight in edges:
        load[parent] = load.get(parent, 0.0) + weight
    return load
