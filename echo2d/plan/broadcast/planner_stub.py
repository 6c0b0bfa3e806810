"""The stand-in for the coordinator: makes the plan, mends it when peers break, go or come. Knows what peers report.

Reports of stalled parents are gathered for a moment, since everybody below a stalled peer reports: only a parent that
does not itself wait for another is made a leaf.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

from echo2d.core.base.ids import PeerId, PlanId
from echo2d.core.cluster.quarantine import Quarantine
from echo2d.core.relay.events import ReportEdgeBroken
from echo2d.core.topology.edges import changed_peers, edge_secret
from echo2d.core.topology.plan import Job, PeerFacts, Plan
from echo2d.core.topology.planner import is_much_better
from echo2d.core.topology.repair import join, repair
from echo2d.core.topology.shapes import plan_shape


class PlannerStub:
    """The current plan. Every change returns the peers who are to be told their edges."""

    def __init__(self, job: Job, shape: str, chains: int, within_s: float | None = None) -> None:
        self._job = job
        self._shape = shape
        self._chains = chains
        self._within_s = within_s
        self._stalled: dict[PeerId, PeerId] = {}
        self._gone: set[PeerId] = set()
        self.quarantine = Quarantine()
        self.plan: Plan | None = None
        self.generations = 0

    def start(self, seed: PeerFacts, peers: Sequence[PeerFacts]) -> set[PeerId]:
        """A plan of its own number, in which sequence numbers start anew."""
        return self._follow(self._new_plan(seed, peers))

    def learn(self, seed: PeerFacts, peers: Sequence[PeerFacts]) -> set[PeerId]:
        """More is known of the peers than when the plan was made."""
        assert self.plan is not None
        plan = self._new_plan(seed, peers)
        return self._follow(plan) if is_much_better(plan, self.plan) else set()

    def _new_plan(self, seed: PeerFacts, peers: Sequence[PeerFacts]) -> Plan:
        number = PlanId(1 if self.plan is None else self.plan.plan_id + 1)
        return plan_shape(
            self._shape,
            number,
            self._job,
            seed,
            peers,
            chains=self._chains,
            within_s=self._within_s,
        )

    def _follow(self, plan: Plan) -> set[PeerId]:
        self.plan = plan
        self._gone -= plan.facts().keys()
        plan.check()
        return set(plan.facts())

    def came(self, facts: PeerFacts, holders: Collection[PeerId]) -> set[PeerId]:
        """A peer that is not the root said hello, for the first time or again. holders: who has everything."""
        assert self.plan is not None
        self._gone.discard(facts.peer)
        old = self.plan
        return self._change(old, join(self._without(facts.peer), facts, holders)) | {facts.peer}

    def went(self, peer: PeerId) -> set[PeerId]:
        """The coordinator's own connection to this peer is gone."""
        assert self.plan is not None
        self._gone.add(peer)
        return self._change(self.plan, self._without(peer))

    def broken(self, reporter: PeerId, report: ReportEdgeBroken) -> bool:
        """Keeps a report; True if `decide` is to be called in a moment."""
        plan = self.plan
        assert plan is not None
        if report.plan != plan.plan_id or report.peer == plan.root:
            return False
        if not any(stripe.tree.parents.get(reporter) == report.peer for stripe in plan.stripes):
            return False
        first = not self._stalled
        self._stalled[reporter] = report.peer
        return first

    def decide(self) -> set[PeerId]:
        """Makes leaves of the parents that were reported and do not wait for another."""
        assert self.plan is not None
        accused = {peer for peer in self._stalled.values() if peer not in self._stalled}
        self._stalled = {}
        told: set[PeerId] = set()
        for peer in sorted(accused):
            facts = self.plan.facts().get(peer)
            if facts is not None:
                told |= self._change(self.plan, join(repair(self.plan, peer), facts))
        return told

    def accused(self, accuser: PeerId, accused: PeerId, now: float) -> set[PeerId]:
        """A bad frame came from the accused: whoever is at fault becomes a leaf for good."""
        assert self.plan is not None
        is_seed = accuser == self.plan.root
        facts = self.plan.facts().get(
            self.quarantine.accuse(accuser, accused, is_seed=is_seed, now=now)
        )
        if facts is None or facts.receive_only:
            return set()
        leaf = replace(facts, receive_only=True)
        return self._change(self.plan, join(repair(self.plan, leaf.peer), leaf))

    def secret(self, one: PeerId, other: PeerId) -> bytes:
        assert self.plan is not None
        return edge_secret(self.plan.plan_id.to_bytes(32, "big"), one, other)

    def _without(self, peer: PeerId) -> Plan:
        assert self.plan is not None
        return repair(self.plan, peer) if peer in self.plan.facts() else self.plan

    def _change(self, old: Plan, new: Plan) -> set[PeerId]:
        new.check()
        self.plan = new
        self.generations += new.generation > old.generation
        return changed_peers(old, new)
