"""One version on its way: its form as the seed encodes it, the roots that name its segments, and the plan.

    waits for the seed --EncodeVersion--> encoding --first segment--> planned --last root--> complete

The plan is made with the first root, for a peer knows what to do with a plan only when it knows the form. Sequence
numbers belong to one start of the seed, so a new one gets a new plan. Not here: which version spreads.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from echo2d.core.base.bounded_dict import keep_newest
from echo2d.core.base.ids import SEGMENTS_MAX, Digest, FormId, PeerId, PlanId, SegmentId
from echo2d.core.cluster.events import VersionPublished
from echo2d.core.cluster.membership import PEERS_MAX, Peer
from echo2d.core.cluster.rules import RunRules
from echo2d.core.protocol.control_messages import (
    EncodeVersion,
    FormEncoded,
    PlanEdges,
    SegmentEncoded,
    SegmentPage,
)
from echo2d.core.topology.edges import changed_peers, edges_for
from echo2d.core.topology.plan import STRIPES_MAX, Job, PeerFacts, Plan
from echo2d.core.topology.planner import is_much_better, plan_again
from echo2d.core.topology.repair import join, repair
from echo2d.core.topology.shapes import plan_shape
from echo2d.core.weights.encoder import RootWriter
from echo2d.core.weights.encoding import FormFacts, frame_bytes_for
from echo2d.core.weights.signed_index import PAGE_SEGMENTS_MAX, FormTotals, Root
from echo2d.errors import PeerFault

REPAIRS_MAX = (
    256  # of one plan because of broken edges; then it stays as it is until the next version
)
LEARN_S = 3.0  # of transfer show what a peer can do of whom nothing was known
TOLD_MAX = 16  # peers that are told a new plan at a time: who waits for a lease meanwhile waits milliseconds ...
TELL_S = 0.01  # ... and so long until the next are: telling 1,000 peers takes 0.6 s at least
DELTA_SHARE = 0.05  # of the snapshot: what a delta is expected to take before one has been made
Secret = Callable[[PeerId, PeerId], bytes]


def peer_facts(peer: Peer) -> PeerFacts:
    """What the planner may count on; downlinks are not measured."""
    paces = [rate for rate in (peer.pace, peer.uplink_limit) if rate is not None]
    return PeerFacts(
        peer.peer,
        peer.uplink,
        None,
        peer.address,
        receive_only=peer.receive_only or peer.quarantined,
        pace=min(paces, default=None),
        uplink_limit=peer.uplink_limit,
    )


@dataclass(slots=True)
class Transmission:
    """See the module docstring. base: what a delta is made from; via: the snapshots between, if it is composed of those
    that lead there. expected_bytes: on the wire, until it is known."""

    record: VersionPublished
    base: VersionPublished | None
    expected_bytes: int
    facts: FormFacts
    writer: RootWriter
    secret: Secret
    began_at: float
    whole_at: float  # at the seed; before that, when it began
    plan: Plan | None = None
    learn_at: float | None = (
        None  # when the plan is looked at again; None: nothing has come yet, inf: it stays
    )
    untold: dict[PeerId, None] = field(
        default_factory=dict
    )  # those who are still to be told the plan, parents first
    newest_root: Root | None = None
    totals: FormTotals | None = None
    verified: dict[PeerId, None] = field(default_factory=dict)  # a set in the order of arrival
    failed: dict[PeerId, int] = field(
        default_factory=dict
    )  # how often it arrived but did not become a snapshot
    received: dict[PeerId, tuple[int, int]] = field(
        default_factory=dict
    )  # payload bytes, frames that came twice
    seed_sent_bytes: int = 0
    encode_failures: int = 0
    encode_at: float | None = None  # when the seed is told again
    repairs: int = 0
    via: tuple[Digest, ...] | None = None
    neighbours_then: dict[PeerId, set[PeerId]] = field(
        default_factory=dict
    )  # of those at fault for bad frames

    @staticmethod
    def start(
        record: VersionPublished,
        rules: RunRules,
        secret: Secret,
        *,
        now: float,
        base: VersionPublished | None = None,
        delta_bytes: int | None = None,
        frame_bytes: int | None = None,
        via: tuple[Digest, ...] | None = None,
    ) -> "Transmission":
        """delta_bytes: what a delta is expected to take. frame_bytes: as chosen before, if it was."""
        expected = record.full_bytes
        if base is not None:
            expected = int(expected * DELTA_SHARE) if delta_bytes is None else delta_bytes
        facts = FormFacts(
            rules.run_id,
            record.epoch,
            record.version,
            record.publish_seq,
            "full" if base is None else "delta" if via is None else "composed",
            None if base is None else base.digest,
            frame_bytes or frame_bytes_for(expected),
        )
        return Transmission(
            record, base, max(1, expected), facts, RootWriter(facts), secret, now, now, via=via
        )

    @property
    def form(self) -> FormId:
        return self.facts.form

    def copies(self) -> set[str]:
        """Paths of the snapshot copies that it is made from."""
        base = None if self.base is None or self.via is not None else self.base.path
        return {path for path in (self.record.path, base) if path is not None}

    def order(self, *, aside: bool = False) -> EncodeVersion:
        """What the seed is to do; it reports the segments it has already once more."""
        record, facts = self.record, self.facts
        base_path = None if self.base is None or self.via is not None else self.base.path
        return EncodeVersion(
            self.form, facts.kind, record.version, record.digest, record.path, facts.frame_bytes, facts.encode(),
            base_path, aside, self.via or (),
        )  # fmt: skip

    # --- the form

    def has_changed(self, message: SegmentEncoded) -> bool:
        """Whether it contradicts what was reported before, and signed."""
        return self.writer.segments[message.segment : message.segment + 1] not in (
            [],
            [message.digest],
        )

    def segment_encoded(self, message: SegmentEncoded) -> list[Root]:
        """A finished segment, in order or repeated. PeerFault if it is neither."""
        known = self.writer.segments
        if message.segment < len(known):
            return []
        if (
            message.segment != len(known)
            or self.totals is not None
            or message.segment >= SEGMENTS_MAX
        ):
            raise PeerFault(f"segment {message.segment} of form {message.form} is out of order")
        self.writer.add(message.digest)
        return self._rooted(self.writer.take())

    def form_encoded(self, message: FormEncoded) -> list[Root]:
        """The form is whole; believed only with the snapshot that was published. PeerFault otherwise."""
        if self.totals is not None:
            return []
        if message.snapshot != self.record.digest:
            raise PeerFault(f"form {message.form} is not of the snapshot that was published")
        if message.segments != len(self.writer.segments) or not message.segments:
            raise PeerFault(f"form {message.form} ends after {message.segments} segments")
        self.totals = FormTotals(message.wire_bytes, message.full_bytes, message.snapshot)
        self.expected_bytes = max(1, message.wire_bytes)
        return self._rooted(self.writer.take(self.totals))

    def page(self, start: SegmentId) -> SegmentPage:
        return SegmentPage(
            self.form, start, tuple(self.writer.segments[start : start + PAGE_SEGMENTS_MAX])
        )

    def _rooted(self, roots: list[Root]) -> list[Root]:
        if roots:
            self.newest_root = roots[-1]
        return roots

    def has_verified(self, peer: PeerId) -> None:
        """The oldest of PEERS_MAX makes room: whoever it was, others have come since."""
        self.verified.pop(peer, None)
        self.verified[peer] = None
        keep_newest(self.verified, PEERS_MAX)

    # --- the plan; each returns the edges to be sent

    def make_plan(
        self,
        plan_id: PlanId,
        rules: RunRules,
        seed: Peer,
        peers: Sequence[Peer],
        last: Plan | None = None,
    ) -> dict[PeerId, PlanEdges]:
        """A new plan for everyone, over the peers of now; the trees of the last one if they still suit."""
        return self._follow(self._new_plan(plan_id, rules, seed, peers, last))

    def learn(
        self, plan_id: PlanId, rules: RunRules, seed: Peer, peers: Sequence[Peer]
    ) -> dict[PeerId, PlanEdges]:
        """The plan was made by guess: now that more is known another one may be much better."""
        self.learn_at = math.inf
        plan = self._new_plan(plan_id, rules, seed, peers, None)
        return (
            self._follow(plan) if self.plan is not None and is_much_better(plan, self.plan) else {}
        )

    def moved(self, now: float) -> None:
        """Frames arrive."""
        if self.learn_at is None and self.plan is not None:
            self.learn_at = now + LEARN_S if self.plan.is_guess else math.inf

    def _new_plan(
        self, plan_id: PlanId, rules: RunRules, seed: Peer, peers: Sequence[Peer], last: Plan | None
    ) -> Plan:
        job = Job(self.form, self.expected_bytes, self.facts.frame_bytes)
        root, others = peer_facts(seed), [peer_facts(peer) for peer in peers]
        chains = min(rules.chains, STRIPES_MAX)
        again = None if last is None else plan_again(last, plan_id, job, root, others)
        if again is not None:
            return again
        return plan_shape(rules.shape, plan_id, job, root, others, chains=chains)

    def _follow(self, plan: Plan) -> dict[PeerId, PlanEdges]:
        self.plan = plan
        self.repairs = 0
        self.untold = dict.fromkeys(_parents_first(plan))
        return self.tell()

    def tell(self) -> dict[PeerId, PlanEdges]:
        """The next TOLD_MAX of those who have not been told the plan."""
        return self._edges(list(self.untold)[:TOLD_MAX])

    def admit(self, peer: Peer, *, renewed: bool) -> dict[PeerId, PlanEdges]:
        """A newcomer becomes a leaf, and fetches from those who have verified it.

        Who is in the plan already gets its edges again, or a new place if renewed.
        """
        if self.plan is None or peer.peer == self.plan.root:
            return {} if self.plan is None else self._edges([peer.peer])
        placed = peer.peer in self.plan.facts()
        if placed and not renewed:
            return self._edges([peer.peer])
        before = self.plan
        plan = repair(before, peer.peer) if placed else before
        self.plan = join(plan, peer_facts(peer), self.verified)
        return self._edges(
            [*changed_peers(before, self.plan), *self.neighbours(peer.peer), peer.peer]
        )

    def remove(self, peer: PeerId) -> dict[PeerId, PlanEdges]:
        """The peer is lost."""
        self.failed.pop(peer, None)
        self.received.pop(peer, None)
        self.untold.pop(peer, None)
        if self.plan is None or peer == self.plan.root or not self.has_place(peer):
            return {}
        before, self.plan = self.plan, repair(self.plan, peer)
        return self._edges(changed_peers(before, self.plan))

    def make_leaf(self, peer: PeerId, *, for_good: bool = False) -> dict[PeerId, PlanEdges]:
        """It does not pass on well: it gets a new place, with nobody below; for good, if its frames were bad."""
        if self.plan is None or self.repairs >= REPAIRS_MAX or peer == self.plan.root:
            return {}
        facts = self.plan.facts().get(peer)
        if facts is None or facts.receive_only:
            return {}
        if for_good:
            self.neighbours_then[peer] = self.neighbours(peer)
            facts = replace(facts, receive_only=True)
        self.repairs += 1
        before, self.plan = self.plan, join(repair(self.plan, peer), facts, self.verified)
        return self._edges(changed_peers(before, self.plan))

    def has_place(self, peer: PeerId) -> bool:
        """Whether the plan names it."""
        return self.plan is not None and peer in self.plan.facts()

    def may_accuse(self, accuser: PeerId, accused: PeerId) -> bool:
        """Whether they share an edge, or did until the accused was found at fault."""
        return accused in self.neighbours(accuser) or accuser in self.neighbours_then.get(
            accused, ()
        )

    def neighbours(self, peer: PeerId) -> set[PeerId]:
        """Those it shares an edge with; it cannot know of others whether they are at fault."""
        return (
            set()
            if self.plan is None
            else {edge.peer for edge in edges_for(self.plan, peer, self.secret).peers}
        )

    def _edges(self, peers: Sequence[PeerId] | set[PeerId]) -> dict[PeerId, PlanEdges]:
        if self.plan is None:
            return {}
        for peer in peers:
            self.untold.pop(peer, None)
        return {
            peer: edges_for(self.plan, peer, self.secret) for peer in dict.fromkeys(sorted(peers))
        }

    def check(self) -> None:
        self.writer.check()
        assert max(len(self.verified), len(self.failed), len(self.received)) <= PEERS_MAX
        assert len(self.neighbours_then) <= REPAIRS_MAX
        if self.plan is not None:
            self.plan.check()
            assert self.plan.form == self.form
            assert self.untold.keys() <= self.plan.facts().keys()
        assert (self.newest_root is None) == (not self.writer.segments)
        assert self.totals is None or self.totals.snapshot == self.record.digest


def _parents_first(plan: Plan) -> list[PeerId]:
    """Its peers by how near to the root they come."""
    depth = {plan.root: 0}
    for stripe in plan.stripes:
        for peer, hops in stripe.tree.depths().items():
            depth[peer] = min(hops, depth.get(peer, hops))
    return sorted(depth, key=depth.__getitem__)
