"""Plans as values: over which trees a form spreads from its root to all peers.

A plan holds weights and trees, not frames, and is immutable: mending one makes the next generation. Two peers that
nobody can dial never share an edge, and a peer that only receives has no children.

Not here: making plans (`planner`), what they cost (`cost_model`), mending them (`repair`), what each peer is told
(`edges`), measuring rates (`uplink_rates`), which frames go where (`stripes`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from echo2d.core.base.ids import FormId, Generation, PeerId, PlanId
from echo2d.core.protocol.control_messages import Address

# The shape of a plan in which only the root sends: a repair keeps it so.
STAR = "star"

STRIPES_MAX = (
    64  # of one plan: one tree per relay up to 40 peers; more stripes only divide the lanes
)


@dataclass(frozen=True, slots=True)
class PeerFacts:
    """What is known of a peer. Rates in bytes/s, None: not measured. address: None if nobody can dial it.

    receive_only: it passes nothing on. latency_s: one way to the middle of the network, half its RTT to the seed;
    between two peers it takes the sum of theirs. None: not measured. pace: bytes/s that it is to send at most, to all
    its children together; None: as fast as it can. uplink_limit: what its owner allows; None: everything.
    """

    peer: PeerId
    uplink: float | None
    downlink: float | None
    address: Address | None
    receive_only: bool = False
    latency_s: float | None = None
    pace: float | None = None
    uplink_limit: float | None = None


@dataclass(frozen=True)
class Tree:
    """A tree over all peers: parent of every peer but the root. Not to be changed."""

    root: PeerId
    parents: Mapping[PeerId, PeerId]

    @cached_property
    def below(self) -> Mapping[PeerId, tuple[PeerId, ...]]:
        """The children of every peer that has some, in the order of `parents`."""
        below: dict[PeerId, list[PeerId]] = {}
        for child, parent in self.parents.items():
            below.setdefault(parent, []).append(child)
        return {parent: tuple(children) for parent, children in below.items()}

    def children(self, peer: PeerId) -> tuple[PeerId, ...]:
        return self.below.get(peer, ())

    def downwards(self) -> list[PeerId]:
        """The root and every peer that a path reaches, parents before their children."""
        order = [self.root]
        for peer in order:
            order += self.children(peer)
        return order

    def depths(self) -> dict[PeerId, int]:
        """Hops from the root; peers that no path reaches are left out."""
        depths = {self.root: 0}
        for peer in self.downwards()[1:]:
            depths[peer] = depths[self.parents[peer]] + 1
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


@dataclass(frozen=True)
class Plan:
    """peers[0] is the root. predicted_s, bound_s: T_verify by the cost model, and no plan can be faster.

    shape: what the planner calls these trees, for the status; "star", "chain" and "relay" are in use.
    joined: the peers that came, or got a new place, since the plan was made. sources: those who hold the whole form,
    for a newcomer that fetches it from them.
    """

    plan_id: PlanId
    generation: Generation
    job: Job
    shape: str
    peers: tuple[PeerFacts, ...]
    stripes: tuple[Stripe, ...]
    predicted_s: float
    bound_s: float
    sources: Mapping[PeerId, tuple[PeerId, ...]] = field(default_factory=dict)
    joined: frozenset[PeerId] = frozenset()

    @property
    def form(self) -> FormId:
        return self.job.form

    @property
    def root(self) -> PeerId:
        return self.peers[0].peer

    @cached_property
    def _by_peer(self) -> Mapping[PeerId, PeerFacts]:
        return {facts.peer: facts for facts in self.peers}

    def facts(self) -> Mapping[PeerId, PeerFacts]:
        """Not to be changed."""
        return self._by_peer

    @cached_property
    def shares(self) -> Mapping[tuple[PeerId, PeerId], float]:
        """The share of the form that goes over every edge, by (parent, child). Not to be changed."""
        shares: dict[tuple[PeerId, PeerId], float] = {}
        for stripe in self.stripes:
            for child, parent in stripe.tree.parents.items():
                shares[parent, child] = shares.get((parent, child), 0.0) + stripe.weight
        return shares

    def copies(self) -> dict[PeerId, float]:
        """How many times the whole form each peer sends; those that send nothing are left out."""
        return copies(self.stripes)

    @property
    def is_guess(self) -> bool:
        """Whether somebody passes something on whose uplink was never measured."""
        facts = self.facts()
        return any(
            facts[parent].uplink is None for stripe in self.stripes for parent in stripe.tree.below
        )

    def check(self) -> None:
        """Every stripe reaches every peer once, without a cycle, over edges that can come about."""
        facts = self.facts()
        assert len(facts) == len(self.peers)
        assert self.joined <= facts.keys()
        assert 0 < len(self.stripes) <= STRIPES_MAX
        assert abs(sum(stripe.weight for stripe in self.stripes) - 1.0) < 1e-9
        for stripe in self.stripes:
            assert stripe.weight > 0
            assert stripe.tree.root == self.root
            assert set(stripe.tree.parents) == set(facts) - {self.root}
            assert len(stripe.tree.downwards()) == len(facts)
            assert all(
                linkable(facts[child], facts[parent])
                for child, parent in stripe.tree.parents.items()
            )
            assert not any(facts[parent].receive_only for parent in stripe.tree.below)
        for peer, sources in self.sources.items():
            assert all(linkable(facts[peer], facts[source]) for source in sources)
            assert not any(
                source in (peer, self.root) or facts[source].receive_only for source in sources
            )


def copies(stripes: tuple[Stripe, ...]) -> dict[PeerId, float]:
    """How many times the whole form each peer sends; those that send nothing are left out."""
    sent: dict[PeerId, float] = {}
    for stripe in stripes:
        for parent, children in stripe.tree.below.items():
            sent[parent] = sent.get(parent, 0.0) + stripe.weight * len(children)
    return sent


def linkable(one: PeerFacts, other: PeerFacts) -> bool:
    """Whether one of the two can dial the other."""
    return one.address is not None or other.address is not None
