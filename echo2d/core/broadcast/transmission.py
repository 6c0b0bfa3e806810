"""One version that is being sent: its form, the roots that name its segments, and the plan.

    waits for the seed --EncodeVersion--> encoding --first segment--> planned --last root--> whole

The plan is made with the first root, because a peer cannot use a plan before it knows the form.
Sequence numbers of frames are valid only until the seed restarts, so a restarted seed gets a new plan.
Not here: which version spreads (`publishing`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from echo2d.core.base.bounded_dict import keep_newest
from echo2d.core.base.ids import SEGMENTS_MAX, Digest, FormId, PeerId, PlanId, SegmentId
from echo2d.core.cluster.events import VersionPublished
from echo2d.core.cluster.membership import PEERS_MAX
from echo2d.core.cluster.peer import Peer
from echo2d.core.protocol.control_messages import (
    EncodeVersion,
    FormEncoded,
    PlanEdges,
    SegmentEncoded,
    SegmentPage,
)
from echo2d.core.rules.run import RunRules
from echo2d.core.topology.edges import changed_peers, edges_for
from echo2d.core.topology.few_copies import is_worth_keeping
from echo2d.core.topology.plan import STRIPES_MAX, Job, PeerFacts, Plan
from echo2d.core.topology.planner import foretold_s, is_much_better, plan_again
from echo2d.core.topology.repair import join, repair
from echo2d.core.topology.shapes import AUTO, plan_shape
from echo2d.core.weights.encoder import RootWriter
from echo2d.core.weights.form import FormFacts, frame_bytes_for
from echo2d.core.weights.signed_index import PAGE_SEGMENTS_MAX, FormTotals, Root
from echo2d.errors import PeerFault

# A plan is repaired at most this many times because of peers at fault; then it stays until the next version.
REPAIRS_MAX = 256
# After this many seconds of transfer, the rates of unknown peers have been measured.
LEARN_S = 3.0
# A new plan is sent to TOLD_MAX peers every TELL_S, so that leases wait for milliseconds only:
# sending it to 1,000 peers at once would take 0.6 s.
TOLD_MAX = 16
TELL_S = 0.01
Secret = Callable[[PeerId, PeerId], bytes]


def peer_facts(peer: Peer) -> PeerFacts:
    """What the planner may assume of a peer; downlinks are not measured."""
    return PeerFacts(
        peer.peer,
        peer.reach.uplink,
        None,
        peer.address,
        receive_only=peer.reach.receive_only or peer.reach.quarantined,
        uplink_limit=peer.reach.uplink_limit,
    )


@dataclass(slots=True)
class Transmission:
    """See the module docstring."""

    record: VersionPublished
    # The version from which a delta is made; None: the form is full.
    base: VersionPublished | None
    # The size on the wire; an estimate until the form is whole.
    expected_bytes: int
    facts: FormFacts
    writer: RootWriter
    secret: Secret
    began_at: float
    # When the form was whole at the seed; before that, when the transmission began.
    whole_at: float
    plan: Plan | None = None
    # When the plan is reconsidered; None: no frame has arrived yet, inf: never again.
    learn_at: float | None = None
    # The peers to which the plan must still be sent, parents first.
    untold: dict[PeerId, None] = field(default_factory=dict)
    newest_root: Root | None = None
    # Known once the form is whole at the seed.
    totals: FormTotals | None = None
    # The peers that have verified the version: a set, in the order of arrival.
    verified: dict[PeerId, None] = field(default_factory=dict)
    # By peer, how often the form arrived and could not be applied.
    failed: dict[PeerId, int] = field(default_factory=dict)
    # By peer, the payload bytes received, and how many frames arrived twice.
    received: dict[PeerId, tuple[int, int]] = field(default_factory=dict)
    seed_sent_bytes: int = 0
    encode_failures: int = 0
    # When the order is sent to the seed again.
    encode_at: float | None = None
    repairs: int = 0
    # If the delta is composed of kept deltas, the snapshots between them.
    via: tuple[Digest, ...] | None = None
    # The neighbours of each peer at the time when it was found at fault for bad frames.
    neighbours_then: dict[PeerId, set[PeerId]] = field(default_factory=dict)

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
        """Begin the transmission of a version: a delta from `base`, or the full form.

        delta_bytes: the expected size of a delta. frame_bytes: None: chosen by the expected size.
        """
        expected = record.full_bytes
        if base is not None:
            # Before a delta has been made, it is expected to have 5 % of the snapshot's size.
            expected = int(expected * 0.05) if delta_bytes is None else delta_bytes
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
        """The paths of the snapshot copies that this form is made from."""
        base = None if self.base is None or self.via is not None else self.base.path
        return {path for path in (self.record.path, base) if path is not None}

    def order(self, *, aside: bool = False) -> EncodeVersion:
        """The order for the seed. If it has segments of the form already, it reports them again."""
        record, facts = self.record, self.facts
        base_path = None if self.base is None or self.via is not None else self.base.path
        return EncodeVersion(
            self.form,
            facts.kind,
            record.version,
            record.digest,
            record.path,
            facts.frame_bytes,
            facts.encode(),
            base_path,
            aside,
            self.via or (),
        )

    # --- the form

    def has_changed(self, message: SegmentEncoded) -> bool:
        """Whether a segment differs from the one that was reported before, and signed."""
        return self.writer.segments[message.segment : message.segment + 1] not in (
            [],
            [message.digest],
        )

    def segment_encoded(self, message: SegmentEncoded) -> list[Root]:
        """The seed has finished a segment. Returns new roots.

        PeerFault: the segment is neither the next one nor a repeated one.
        """
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
        return self._note_roots(self.writer.take())

    def form_encoded(self, message: FormEncoded) -> list[Root]:
        """The form is whole at the seed. Returns the last root.

        PeerFault: it is of another snapshot than the published one, or lacks segments.
        """
        if self.totals is not None:
            return []
        if message.snapshot != self.record.digest:
            raise PeerFault(f"form {message.form} is not of the snapshot that was published")
        if message.segments != len(self.writer.segments) or not message.segments:
            raise PeerFault(f"form {message.form} ends after {message.segments} segments")
        self.totals = FormTotals(message.wire_bytes, message.full_bytes, message.snapshot)
        self.expected_bytes = max(1, message.wire_bytes)
        return self._note_roots(self.writer.take(self.totals))

    def page(self, start: SegmentId) -> SegmentPage:
        """The digests of the segments from `start` on, at most PAGE_SEGMENTS_MAX."""
        return SegmentPage(
            self.form, start, tuple(self.writer.segments[start : start + PAGE_SEGMENTS_MAX])
        )

    def _note_roots(self, roots: list[Root]) -> list[Root]:
        if roots:
            self.newest_root = roots[-1]
        return roots

    def has_verified(self, peer: PeerId) -> None:
        """Record that the peer has verified this version. Beyond PEERS_MAX the oldest entry is forgotten."""
        self.verified.pop(peer, None)
        self.verified[peer] = None
        keep_newest(self.verified, PEERS_MAX)

    # --- the plan; each method returns the edges to be sent, by peer

    def make_plan(
        self,
        plan_id: PlanId,
        rules: RunRules,
        seed: Peer,
        peers: Sequence[Peer],
        last: Plan | None = None,
        *,
        within_s: float | None = None,
    ) -> dict[PeerId, PlanEdges]:
        """Make a new plan for these peers.

        It keeps the trees of the last plan if they still suit. within_s: the seed sends the fewest
        copies with which the transfer takes no longer than this; None: the seed's bytes cost nothing.
        """
        return self._follow(self._new_plan(plan_id, rules, seed, peers, last, within_s))

    def learn(
        self,
        plan_id: PlanId,
        rules: RunRules,
        seed: Peer,
        peers: Sequence[Peer],
        *,
        within_s: float | None = None,
    ) -> dict[PeerId, PlanEdges]:
        """The plan was a guess. Replace it if another one is much better by what is known now.

        A plan that will end within `within_s` stays, because a faster one may send more copies.
        """
        self.learn_at = math.inf
        plan = self._new_plan(plan_id, rules, seed, peers, None, within_s)
        if self.plan is not None and within_s is not None:
            before_s = foretold_s(self.plan, plan)
            if before_s is not None and before_s <= within_s:
                return {}
        return (
            self._follow(plan) if self.plan is not None and is_much_better(plan, self.plan) else {}
        )

    def moved(self, now: float) -> None:
        """A peer has reported frames: a plan from guessed rates is reconsidered LEARN_S later."""
        if self.learn_at is None and self.plan is not None:
            guessed = self.plan.is_guess and self.plan.depends_on_rates
            self.learn_at = now + LEARN_S if guessed else math.inf

    def _new_plan(
        self,
        plan_id: PlanId,
        rules: RunRules,
        seed: Peer,
        peers: Sequence[Peer],
        last: Plan | None,
        within_s: float | None,
    ) -> Plan:
        job = Job(self.form, self.expected_bytes, self.facts.frame_bytes)
        root, others = peer_facts(seed), [peer_facts(peer) for peer in peers]
        chains = min(rules.dissemination.chains, STRIPES_MAX)
        again = None if last is None else plan_again(last, plan_id, job, root, others)
        if again is not None and (within_s is None or rules.dissemination.shape != AUTO):
            return again
        plan = plan_shape(
            rules.dissemination.shape, plan_id, job, root, others, chains=chains, within_s=within_s
        )
        if again is not None and within_s is not None and is_worth_keeping(again, plan, within_s):
            return again
        return plan

    def _follow(self, plan: Plan) -> dict[PeerId, PlanEdges]:
        self.plan = plan
        self.repairs = 0
        self.untold = dict.fromkeys(_parents_first(plan))
        return self.tell()

    def tell(self) -> dict[PeerId, PlanEdges]:
        """The edges of the next TOLD_MAX peers to which the plan has not been sent."""
        return self._edges(list(self.untold)[:TOLD_MAX])

    def admit(self, peer: Peer, *, renewed: bool) -> dict[PeerId, PlanEdges]:
        """A newcomer becomes a leaf, and fetches from peers that have verified the version.

        A peer that is in the plan already gets its edges again, or a new place if its daemon was
        restarted (renewed).
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
        """The peer is lost: other peers take over its children."""
        self.failed.pop(peer, None)
        self.received.pop(peer, None)
        self.untold.pop(peer, None)
        if self.plan is None or peer == self.plan.root or not self.has_place(peer):
            return {}
        before, self.plan = self.plan, repair(self.plan, peer)
        return self._edges(changed_peers(before, self.plan))

    def make_leaf(self, peer: PeerId, *, for_good: bool = False) -> dict[PeerId, PlanEdges]:
        """Give a peer that does not pass frames on well a new place, without children.

        for_good: it may have no children later either, because its frames were bad.
        """
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
        """Whether the peer is in the plan."""
        return self.plan is not None and peer in self.plan.facts()

    def may_accuse(self, accuser: PeerId, accused: PeerId) -> bool:
        """Whether the two peers share an edge, or did until the accused was found at fault."""
        return accused in self.neighbours(accuser) or accuser in self.neighbours_then.get(
            accused, ()
        )

    def neighbours(self, peer: PeerId) -> set[PeerId]:
        """The peers that share an edge with this one; none if it has no place in the plan.

        A peer cannot know of faults between other peers.
        """
        if self.plan is None or not self.has_place(peer):
            return set()
        return {edge.peer for edge in edges_for(self.plan, peer, self.secret).peers}

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
    """The peers of a plan, in the order of their smallest depth in any of its trees."""
    depth = {plan.root: 0}
    for stripe in plan.stripes:
        for peer, hops in stripe.tree.depths().items():
            depth[peer] = min(hops, depth.get(peer, hops))
    return sorted(depth, key=depth.__getitem__)
