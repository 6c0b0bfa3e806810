"""For any peers the plan reaches all, is fast enough if any plan is, and no smaller bound of copies is enough."""

from hypothesis import given, settings
from hypothesis import strategies as st

from echo2d.core.base.ids import FormId, PeerId, PlanId
from echo2d.core.protocol.control_messages import Address
from echo2d.core.topology.few_copies import COPIES_STEP, plan_within, seed_copies
from echo2d.core.topology.plan import STAR, Job, PeerFacts
from echo2d.core.topology.planner import plan_at_most, plan_auto

JOB = Job(FormId("f" * 32), 10**9, 1 << 18)
RATES = st.one_of(st.none(), st.floats(1e5, 1e9))


@st.composite
def swarms(draw: st.DrawFn) -> tuple[PeerFacts, list[PeerFacts]]:
    def peer(name: str, *, seed: bool = False) -> PeerFacts:
        address = Address(name, 1) if seed or draw(st.integers(0, 3)) else None
        only = not seed and draw(st.integers(0, 5)) == 0
        return PeerFacts(PeerId(name), draw(RATES), draw(RATES), address, receive_only=only)

    return peer("seed", seed=True), [
        peer(f"p{number}") for number in range(draw(st.integers(0, 14)))
    ]


@settings(max_examples=120, deadline=None)
@given(swarms(), st.floats(0.5, 50.0))
def test_no_plan_with_fewer_copies_is_fast_enough(
    swarm: tuple[PeerFacts, list[PeerFacts]], times: float
) -> None:
    seed, peers = swarm
    fastest = plan_auto(PlanId(1), JOB, seed, peers)
    within_s = times * fastest.predicted_s
    plan = plan_within(PlanId(1), JOB, seed, peers, within_s)
    plan.check()
    assert plan.facts().keys() == {facts.peer for facts in (seed, *peers)}
    sent, most = seed_copies(plan), seed_copies(fastest)
    assert sent >= min(1.0, len(peers)) - 1e-9
    if fastest.predicted_s > within_s and plan.predicted_s > within_s:
        assert plan == fastest
        return
    assert plan.predicted_s <= within_s
    assert sent <= max(most, 1.0) + COPIES_STEP
    if sent > 1 + 1e-9:
        # The bound that was found is at most COPIES_STEP above what the plan sends, or the fastest plan's.
        fewer = plan_at_most(PlanId(1), JOB, seed, peers, max(1.0, sent - 2 * COPIES_STEP))
        assert fewer is None or fewer.predicted_s > within_s or most - sent < COPIES_STEP


@settings(max_examples=60, deadline=None)
@given(swarms(), st.floats(1.0, 14.0))
def test_a_plan_keeps_its_bound_on_copies(
    swarm: tuple[PeerFacts, list[PeerFacts]], copies_max: float
) -> None:
    seed, peers = swarm
    plan = plan_at_most(PlanId(1), JOB, seed, peers, copies_max)
    if plan is None:
        # Where every peer passes on and can be dialled, one copy is always enough.
        assert any(facts.receive_only or facts.address is None for facts in peers)
        return
    plan.check()
    assert plan.shape != STAR
    assert seed_copies(plan) <= copies_max * (1 + 1e-6)
