"""The next generation of a plan: a peer has left, or has come. Only the edges around it become different.

Not here: when to mend (the coordinator), and plans from scratch (`shapes`).
"""

from collections.abc import Mapping
from dataclasses import replace

from echo2d.core.ids import Generation, PeerId
from echo2d.core.plan_cost import fill_in, uplink
from echo2d.core.topology import PeerFacts, Plan, Stripe, Tree, linkable


def repair(plan: Plan, lost: PeerId) -> Plan:
    """The next generation without this peer: of its children one takes its place, the others go where uplink is spare.

    Not for the root.
    """
    assert lost != plan.root
    left = _Spare(plan, lost)
    stripes = tuple(replace(stripe, tree=left.without(stripe, lost)) for stripe in plan.stripes)
    peers = tuple(one for one in plan.peers if one.peer != lost)
    generation = Generation(plan.generation + 1)
    return replace(plan, generation=generation, peers=peers, stripes=stripes, joined=plan.joined - {lost})


def join(plan: Plan, newcomer: PeerFacts) -> Plan:
    """The next generation with this peer as a leaf of the peers that have the most uplink to spare."""
    plan = with_leaf(plan, newcomer)
    return replace(plan, generation=Generation(plan.generation + 1), joined=plan.joined | {newcomer.peer})


def with_leaf(plan: Plan, newcomer: PeerFacts) -> Plan:
    """The same plan and this peer, in no stripe above another."""
    assert newcomer.peer not in plan.facts()
    plan = replace(plan, peers=(*plan.peers, newcomer))
    spare = _Spare(plan, newcomer.peer)
    stripes = tuple(replace(stripe, tree=spare.with_leaf(stripe, newcomer.peer)) for stripe in plan.stripes)
    return replace(plan, stripes=stripes)


class _Spare:
    """Who could send how much more. Counts what it gives away."""

    def __init__(self, plan: Plan, changing: PeerId) -> None:
        self._shape = plan.shape
        self._root = plan.root
        self._joined = plan.joined
        self._facts: Mapping[PeerId, PeerFacts] = {one.peer: one for one in fill_in(plan.peers)}
        self._load = plan.copies()
        self._able = {peer for peer, one in self._facts.items() if peer not in (changing, plan.root) and uplink(one)}

    def with_leaf(self, stripe: Stripe, peer: PeerId) -> Tree:
        parents = dict(stripe.tree.parents)
        self._place(parents, stripe, peer, self._able)
        return Tree(self._root, parents)

    def without(self, stripe: Stripe, lost: PeerId) -> Tree:
        """Nobody is put below itself: an orphan's own tree is no place for it."""
        tree = stripe.tree
        parents = {child: parent for child, parent in tree.parents.items() if child != lost}
        orphans = sorted(tree.children(lost), key=lambda one: self._busy(one, stripe))
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

    def _place(self, parents: dict[PeerId, PeerId], stripe: Stripe, peer: PeerId, able: set[PeerId]) -> None:
        """In a star below the root; else below whoever is done soonest with one more child, the root if nobody can.

        Peers that have joined come last: they are far behind, or were found wanting, though nobody has more to spare.
        """
        able = {one for one in able if one != peer and linkable(self._facts[one], self._facts[peer])}
        parent = self._root
        if able and self._shape != "star":
            depths = stripe.tree.depths()
            parent = min(able, key=lambda one: (one in self._joined, self._busy(one, stripe), depths.get(one, 0), one))
        parents[peer] = parent
        self._load[parent] = self._load.get(parent, 0.0) + stripe.weight

    def _busy(self, peer: PeerId, stripe: Stripe) -> float:
        """Forms to send per byte/s of uplink, with one more child."""
        rate = uplink(self._facts[peer])
        return (self._load.get(peer, 0.0) + stripe.weight) / rate if rate else float("inf")
