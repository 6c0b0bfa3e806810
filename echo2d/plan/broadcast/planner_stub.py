"""Stands in for the coordinator: makes the plan, and repairs it when peers fail, leave or join. It knows only what
peers report.

If a peer stalls, every peer below it reports its own parent as stalled. So reports are collected for a moment, and
then only a reported parent that does not itself wait for another parent is made a leaf.
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
    """The current plan. Every change returns the peers to which their new edges must be sent."""

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
        """Make a plan with a new number, in which sequence numbers start at 0."""
        return self._follow(self._new_plan(seed, peers))

    def learn(self, seed: PeerFacts, peers: Sequence[PeerFacts]) -> set[PeerId]:
        """Make a new plan from what is known about the peers now. Use it if it is much better."""
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
        """A peer other than the root has connected, for the first time or again. holders: peers with all frames."""
        assert self.plan is not None
        self._gone.discard(facts.peer)
        old = self.plan
        return self._change(old, join(self._without(facts.peer), facts, holders)) | {facts.peer}

    def went(self, peer: PeerId) -> set[PeerId]:
        """The coordinator has lost its own connection to this peer."""
        assert self.plan is not None
        self._gone.add(peer)
        return self._change(self.plan, self._without(peer))

    def broken(self, reporter: PeerId, report: ReportEdgeBroken) -> bool:
        """Keep a report. Returns whether the caller must call `decide` in a moment."""
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
        """Make leaves of the reported parents that do not themselves wait for another parent."""
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
        """A bad frame came from the accused. The peer that is judged to be at fault becomes a leaf for good."""
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
