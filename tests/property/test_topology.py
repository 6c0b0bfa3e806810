"""Whatever the peers and whatever happens to them, every stripe reaches everyone, and both ends of an edge agree."""

from hypothesis import given, settings
from hypothesis import strategies as st

from echo2d.core.ids import FormId, PeerId, PlanId
from echo2d.core.messages import Address, PlanEdges
from echo2d.core.topology import (
    Job,
    PeerFacts,
    Plan,
    changed_peers,
    edge_secret,
    edges_for,
    join,
    plan_auto,
    plan_chains,
    plan_star,
    repair,
)

JOB = Job(FormId("f" * 32), 10**9, 1 << 18)
RATES = st.one_of(st.none(), st.floats(1e5, 1e9))


@st.composite
def peer_facts(draw: st.DrawFn, name: str) -> PeerFacts:
    address = Address(name, 1) if draw(st.booleans()) else None
    return PeerFacts(PeerId(name), draw(RATES), draw(RATES), address)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    seed = PeerFacts(PeerId("seed"), draw(RATES), draw(RATES), Address("seed", 1))
    peers = [draw(peer_facts(f"p{number}")) for number in range(draw(st.integers(0, 12)))]
    chains = draw(st.integers(1, 5))
    make = draw(st.sampled_from(["star", "chains", "auto"]))
    if make == "star":
        return plan_star(PlanId(1), JOB, seed, peers)
    return (plan_chains if make == "chains" else plan_auto)(PlanId(1), JOB, seed, peers, chains)


@settings(max_examples=60, deadline=None)
@given(plans(), st.lists(st.integers(0, 30), max_size=8), st.data())
def test_plans_stay_whole_through_repairs_and_newcomers(plan: Plan, steps: list[int], data: st.DataObject) -> None:
    plan.check()
    assert plan.predicted_s >= plan.bound_s * (1 - 1e-9)
    for number, step in enumerate(steps):
        before = plan
        if step % 2 or len(plan.peers) == 1:
            plan = join(plan, data.draw(peer_facts(f"new{number}")))
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
            assert all(told[child].stripes[stripe.stripe].parent == peer for child in stripe.children)


def assert_only_these_changed(before: Plan, after: Plan, changed: set[PeerId]) -> None:
    for facts in before.peers:
        if facts.peer in after.facts() and facts.peer not in changed:
            assert edges(before, facts.peer).stripes == edges(after, facts.peer).stripes


def edges(plan: Plan, peer: PeerId) -> PlanEdges:
    return edges_for(plan, peer, lambda one, other: edge_secret(bytes(32), one, other))
