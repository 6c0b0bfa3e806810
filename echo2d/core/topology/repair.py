"""Makes the next generation of a plan after a peer has left or joined.

Only the edges around that peer change, so that all other streams continue.

Not here: when to repair (the coordinator), and plans from scratch (`planner`).
"""

from collections.abc import Collection, Mapping
from dataclasses import replace

from echo2d.core.base.ids import Generation, PeerId
from echo2d.core.topology.cost_model import fill_in, uplink
from echo2d.core.topology.plan import STAR, PeerFacts, Plan, Stripe, Tree, linkable

# A newcomer fetches from at most this many peers: together they fill a downlink of eight times their
# uplink.
SOURCES_MAX = 8


def repair(plan: Plan, lost: PeerId) -> Plan:
    """The next generation without the peer `lost`, which must not be the root.

    In each stripe one child takes its place; its other children go below peers with spare uplink.
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
    """The next generation with this peer as a leaf below the peers with the most spare uplink.

    holders: the peers that hold the whole form. If their spare uplinks together reach the plan's
    rate, the newcomer also fetches from them directly (`Plan.sources`).
    """
    plan = with_leaf(plan, newcomer, holders)
    return replace(
        plan, generation=Generation(plan.generation + 1), joined=plan.joined | {newcomer.peer}
    )


def with_leaf(plan: Plan, newcomer: PeerFacts, holders: Collection[PeerId] = ()) -> Plan:
    """The same generation with this peer added as a leaf of every stripe."""
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
    """Tracks how much more each peer could send; each place that is assigned adds to its sender's load.

    changing: the peer that leaves or joins, which must not get children. holders: the peers that
    hold the whole form.
    """

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
        # If all holders together are slower than the plan, the stripes serve a newcomer faster.
        if sum(map(self._spare, self._holders)) < plan.job.wire_bytes / max(plan.predicted_s, 1e-9):
            self._holders = set()

    def with_leaf(self, stripe: Stripe, peer: PeerId) -> Tree:
        """The stripe's tree with this peer as a leaf."""
        parents = dict(stripe.tree.parents)
        self._place(parents, stripe, peer, self._able)
        return Tree(self._root, parents)

    def sources(self, peer: PeerId) -> tuple[PeerId, ...]:
        """Up to SOURCES_MAX holders that can be linked with, most spare uplink first."""
        able = [one for one in self._holders if linkable(self._facts[one], self._facts[peer])]
        return tuple(sorted(able, key=lambda one: (-self._spare(one), one))[:SOURCES_MAX])

    def _spare(self, peer: PeerId) -> float:
        """Bytes/s that one more receiver would get from this peer."""
        return uplink(self._facts[peer]) / (1 + self._load.get(peer, 0.0))

    def without(self, stripe: Stripe, lost: PeerId) -> Tree:
        """The stripe's tree without the lost peer, whose children find new parents."""
        tree = stripe.tree
        parents = {child: parent for child, parent in tree.parents.items() if child != lost}
        # The first orphan takes the lost peer's place. Peers that joined late come last, as in `_place`.
        orphans = sorted(
            tree.children(lost),
            key=lambda one: (
                one not in self._able,
                one in self._joined,
                self._busy(one, stripe.weight),
            ),
        )
        below = {orphan: set(Tree(orphan, parents).downwards()) for orphan in orphans}
        # The peers of subtrees that have no parent yet. An orphan below one could make a cycle.
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
        """The nearest ancestor of `lost` that the orphan can be linked with, or else the root."""
        parent = tree.parents[lost]
        while not linkable(self._facts[orphan], self._facts[parent]) and parent != tree.root:
            parent = tree.parents[parent]
        return parent

    def _place(
        self, parents: dict[PeerId, PeerId], stripe: Stripe, peer: PeerId, able: set[PeerId]
    ) -> None:
        """Put the peer below the candidate that would finish first with one more child.

        The candidates are the able holders. If there are none, they are all able peers; in a star,
        only the root. Peers that joined this plan late come last: they have much spare uplink only
        because they are far behind, or were made leaves after a fault.
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
        """Forms that the peer must still send per byte/s of its uplink, with `more` forms added."""
        rate = uplink(self._facts[peer])
        return (self._load.get(peer, 0.0) + more) / rate if rate else float("inf")


def _left_to_send(plan: Plan, holders: Collection[PeerId]) -> dict[PeerId, float]:
    """How many copies of the form each peer must still send; holders need nothing more."""
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
