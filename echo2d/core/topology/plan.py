"""Defines plans: the weighted trees over which a form spreads from its root to all peers.

A plan is immutable; a repair makes the next generation. It holds trees, not frames; its weights are
only predictions. Invariants: two peers of which neither can be dialled never share an edge, and a
receive-only peer has no children.

Not here: making plans (`planner`), predicting their time (`cost_model`), repairing them (`repair`),
each peer's part of a plan (`edges`), measuring rates (`uplink_rates`), binding frames to stripes
(`relay/stripes`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from echo2d.core.base.ids import FormId, Generation, PeerId, PlanId
from echo2d.core.protocol.control_messages import Address

# The shape of a plan in which only the root sends, also after a repair.
STAR = "star"
RELAY = "relay"

# A swarm of more peers gets no stripe for each peer: that would need too many links.
SMALL_SWARM = 40
# One plan has at most this many stripes.
STRIPES_MAX = 64


@dataclass(frozen=True, slots=True)
class PeerFacts:
    """What is known about a peer. Rates are in bytes/s; None: not measured."""

    peer: PeerId
    uplink: float | None
    downlink: float | None
    address: Address | None  # None if it cannot be dialled
    receive_only: bool = False  # whether it passes nothing on
    # Half its round trip to the seed, taken as the time to the middle of the network. The latency
    # between two peers is the sum of their two values.
    latency_s: float | None = None
    # The most that its owner allows; None: unlimited.
    uplink_limit: float | None = None


@dataclass(frozen=True)
class Tree:
    """A tree over all peers."""

    root: PeerId
    # The parent of every peer except the root. Immutable.
    parents: Mapping[PeerId, PeerId]

    @cached_property
    def below(self) -> Mapping[PeerId, tuple[PeerId, ...]]:
        """The children of each peer that has any, in the order of `parents`."""
        below: dict[PeerId, list[PeerId]] = {}
        for child, parent in self.parents.items():
            below.setdefault(parent, []).append(child)
        return {parent: tuple(children) for parent, children in below.items()}

    def children(self, peer: PeerId) -> tuple[PeerId, ...]:
        return self.below.get(peer, ())

    def downwards(self) -> list[PeerId]:
        """The root and all peers that are reachable from it, parents before children."""
        order, below = [self.root], self.below
        for peer in order:
            order += below.get(peer, ())
        return order

    def depths(self) -> dict[PeerId, int]:
        """The hops from the root to each reachable peer."""
        depths = {self.root: 0}
        for peer in self.downwards()[1:]:
            depths[peer] = depths[self.parents[peer]] + 1
        return depths


@dataclass(frozen=True, slots=True)
class Stripe:
    """A tree along which frames travel."""

    # The share of the frames that should go this way at the known rates; the weights of a plan add up
    # to 1.
    weight: float
    tree: Tree
    # Above 0: the stripe carries what no ordinary stripe takes, at most this share of the bytes.
    spare: float = 0.0


@dataclass(frozen=True, slots=True)
class Job:
    """What a plan spreads: a form, its estimated bytes on the wire, and bytes per frame."""

    form: FormId
    wire_bytes: int
    frame_bytes: int


@dataclass(frozen=True)
class Plan:
    """A plan; peers[0] is the root."""

    plan_id: PlanId
    generation: Generation
    job: Job
    # The planner's name for these trees, for the status: "star", "chain" or "relay".
    shape: str
    peers: tuple[PeerFacts, ...]
    stripes: tuple[Stripe, ...]
    predicted_s: float  # T_verify by the cost model
    bound_s: float  # no plan can be faster
    # For each newcomer, the peers with the whole form from which it fetches frames.
    sources: Mapping[PeerId, tuple[PeerId, ...]] = field(default_factory=dict)
    # Peers that joined, or got a new place, since the plan was made.
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
        """The facts of all peers; not to be modified."""
        return self._by_peer

    @cached_property
    def shares(self) -> Mapping[tuple[PeerId, PeerId], float]:
        """The share of the form that travels over each edge (parent, child); not to be modified."""
        shares: dict[tuple[PeerId, PeerId], float] = {}
        for stripe in self.stripes:
            for child, parent in stripe.tree.parents.items():
                shares[parent, child] = shares.get((parent, child), 0.0) + stripe.weight
        return shares

    def copies(self) -> dict[PeerId, float]:
        """How many copies of the form each peer sends; peers that send nothing are left out."""
        return copies(self.stripes)

    @property
    def depends_on_rates(self) -> bool:
        """Whether the planner would make other trees at other rates."""
        return self.shape != STAR and not any(stripe.spare for stripe in self.stripes)

    @property
    def is_guess(self) -> bool:
        """Whether any peer that sends has an uplink that was never measured."""
        facts = self.facts()
        return any(
            facts[parent].uplink is None for stripe in self.stripes for parent in stripe.tree.below
        )

    def check(self) -> None:
        """Assert that each stripe reaches every peer once, without a cycle, over edges that can be dialled."""
        facts = self.facts()
        assert len(facts) == len(self.peers)
        assert self.joined <= facts.keys()
        assert 0 < len(self.stripes) <= STRIPES_MAX
        assert abs(sum(stripe.weight for stripe in self.stripes) - 1.0) < 1e-9
        for stripe in self.stripes:
            assert stripe.weight >= 0
            assert 0 <= stripe.spare <= 1
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
    """How many copies of the form each peer sends; peers that send nothing are left out."""
    sent: dict[PeerId, float] = {}
    for stripe in stripes:
        for parent, children in stripe.tree.below.items():
            sent[parent] = sent.get(parent, 0.0) + stripe.weight * len(children)
    return sent


def linkable(one: PeerFacts, other: PeerFacts) -> bool:
    """Whether one of the two can dial the other."""
    return one.address is not None or other.address is not None
