"""For any peers and any events, every stripe reaches all peers, and both ends of an edge agree."""

import math
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from echo2d.core.base.ids import FormId, PeerId, PlanId
from echo2d.core.protocol.control_messages import Address, PlanEdges
from echo2d.core.topology.edges import changed_peers, edge_secret, edges_for
from echo2d.core.topology.plan import Job, PeerFacts, Plan
from echo2d.core.topology.planner import plan_auto, plan_chains, plan_star
from echo2d.core.topology.repair import join, repair

JOB = Job(FormId("f" * 32), 10**9, 1 << 18)
RATES = st.one_of(st.none(), st.floats(1e5, 1e9))


@st.composite
def peer_facts(draw: st.DrawFn, name: str) -> PeerFacts:
    address = Address(name, 1) if draw(st.booleans()) else None
    only, latency = draw(st.integers(0, 4)) == 0, draw(st.one_of(st.none(), st.floats(0.0, 0.5)))
    return PeerFacts(
        PeerId(name), draw(RATES), draw(RATES), address, receive_only=only, latency_s=latency
    )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    seed = PeerFacts(PeerId("seed"), draw(RATES), draw(RATES), Address("seed", 1))
    peers = [draw(peer_facts(f"p{number}")) for number in range(draw(st.integers(0, 12)))]
    chains = draw(st.integers(1, 5))
    make = draw(st.sampled_from(["star", "chains", "auto"]))
    if make == "star":
        return plan_star(PlanId(1), JOB, seed, peers)
    if make == "auto":
        return plan_auto(PlanId(1), JOB, seed, peers)
    return plan_chains(PlanId(1), JOB, seed, peers, chains)


@settings(max_examples=60, deadline=None)
@given(plans(), st.lists(st.integers(0, 30), max_size=8), st.data())
def test_plans_stay_whole_through_repairs_and_newcomers(
    plan: Plan, steps: list[int], data: st.DataObject
) -> None:
    plan.check()
    assert plan.predicted_s >= plan.bound_s * (1 - 1e-9)
    for number, step in enumerate(steps):
        before = plan
        if step % 2 or len(plan.peers) == 1:
            holders = (
                data.draw(st.sets(st.sampled_from([one.peer for one in plan.peers[1:]])))
                if plan.peers[1:]
                else ()
            )
            plan = join(plan, data.draw(peer_facts(f"new{number}")), holders)
        else:
            plan = repair(plan, plan.peers[1 + step % (len(plan.peers) - 1)].peer)
        plan.check()
        assert plan.generation == before.generation + 1
        assert_only_these_changed(before, plan, changed_peers(before, plan))


@settings(max_examples=60, deadline=None)
@given(plans())
def test_both_ends_know_the_edge_its_secret_and_who_dials(plan: Plan) -> None:
    told = {facts.peer: edges(plan, facts.peer) for facts in plan.peers}
    for peer, mine in told.items():
        for edge in mine.peers:
            (back,) = [other for other in told[edge.peer].peers if other.peer == peer]
            assert edge.secret == back.secret
            assert edge.dial != back.dial
            assert (edge.address is not None) == edge.dial
        for stripe in mine.stripes:
            assert all(
                told[child].stripes[stripe.stripe].parent == peer for child in stripe.children
            )


def assert_only_these_changed(before: Plan, after: Plan, changed: set[PeerId]) -> None:
    for facts in before.peers:
        if facts.peer in after.facts() and facts.peer not in changed:
            mine = replace(edges(before, facts.peer), generation=after.generation)
            assert mine == edges(after, facts.peer)


def edges(plan: Plan, peer: PeerId) -> PlanEdges:
    return edges_for(plan, peer, lambda one, other: edge_secret(bytes(32), one, other))


@settings(max_examples=150)
@given(st.integers(1, 40), st.floats(1e5, 1e9), st.data())
def test_the_plan_is_near_the_bound(count: int, seed_uplink: float, data: st.DataObject) -> None:
    """Whatever the uplinks: at least 64 MiB and 5 s, RTT up to 100 ms, everyone dialable, downlinks no obstacle."""
    uplinks = data.draw(st.lists(st.floats(1e5, 1e9), min_size=count, max_size=count))
    rate = min(seed_uplink, (seed_uplink + sum(uplinks)) / count)
    latencies = st.floats(0.0, 0.025)
    wire = max(64 << 20, math.ceil(5.0 * rate))
    frame = (64 << 10) if wire < (256 << 20) else (256 << 10)
    names = ["seed", *(f"p{number}" for number in range(count))]
    peers = [
        PeerFacts(PeerId(name), uplink, 2 * rate, Address(name, 1), latency_s=data.draw(latencies))
        for name, uplink in zip(names, [seed_uplink, *uplinks], strict=True)
    ]
    plan = plan_auto(PlanId(1), Job(JOB.form, wire, frame), peers[0], peers[1:])
    plan.check()
    assert plan.predicted_s <= 1.1 * plan.bound_s
    for facts in peers:
        assert facts.uplink is not None
        assert plan.copies().get(facts.peer, 0.0) * wire <= facts.uplink * plan.predicted_s * (
            1 + 1e-9
        )
