"""For any peers and rates of a small swarm, every peer that can send relays, and no limit is exceeded."""

from hypothesis import given, settings
from hypothesis import strategies as st

from echo2d.core.base.ids import FormId, PeerId, PlanId
from echo2d.core.protocol.control_messages import Address
from echo2d.core.topology.plan import SMALL_SWARM, STRIPES_MAX, Job, PeerFacts, Plan
from echo2d.core.topology.planner import plan_at_most, plan_auto

JOB = Job(FormId("f" * 32), 10**9, 1 << 18)
RATES = st.one_of(st.none(), st.just(0.0), st.floats(0.0, 1e10), st.floats(1e5, 1e9))
Fleet = tuple[PeerFacts, list[PeerFacts]]


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    closed, silent = draw(st.integers(0, 4)), draw(st.integers(0, 3))

    def peer(name: str) -> PeerFacts:
        address = Address(name, 1) if draw(st.integers(0, 4)) >= closed else None
        only = draw(st.integers(0, 4)) < silent
        return PeerFacts(PeerId(name), draw(RATES), None, address, receive_only=only)

    seed = PeerFacts(PeerId("seed"), draw(RATES), None, Address("seed", 1))
    count = draw(st.integers(0, SMALL_SWARM))
    return seed, [peer(f"p{number:02}") for number in range(count)]


def able(fleet: Fleet) -> set[PeerId]:
    """Who can send, as far as is known."""
    return {one.peer for one in fleet[1] if not one.receive_only and one.uplink}


def assert_sound(plan: Plan, fleet: Fleet) -> None:
    plan.check()
    assert plan.facts().keys() == {one.peer for one in (fleet[0], *fleet[1])}
    assert 0 < len(plan.stripes) <= STRIPES_MAX
    assert abs(sum(stripe.weight for stripe in plan.stripes) - 1) < 1e-9


@settings(max_examples=120, deadline=None)
@given(fleets())
def test_every_plan_of_a_small_swarm_is_sound(fleet: Fleet) -> None:
    assert_sound(plan_auto(PlanId(1), JOB, *fleet), fleet)


@settings(max_examples=120, deadline=None)
@given(fleets())
def test_every_peer_that_can_send_is_the_first_of_a_stripe(fleet: Fleet) -> None:
    """Unless there is nobody to send to, or no peer that can be dialled to reach the others through."""
    seed, peers = fleet
    plan = plan_auto(PlanId(1), JOB, seed, peers)
    firsts = {
        first
        for stripe in plan.stripes
        for first in stripe.tree.children(seed.peer)
        if not stripe.spare and stripe.tree.children(first)
    }
    assert firsts <= {one.peer for one in peers if not one.receive_only}
    apart = {one.peer for one in peers if one.address is None}
    if len(peers) > 1 and (len(apart) < 2 or able(fleet) - apart):
        assert firsts >= able(fleet)


@settings(max_examples=120, deadline=None)
@given(fleets(), st.floats(1.0, 50.0))
def test_the_seed_never_sends_more_copies_than_it_may(fleet: Fleet, copies_max: float) -> None:
    """Neither as foretold, nor where every spare stripe carries all that it may."""
    plan = plan_at_most(PlanId(1), JOB, *fleet, copies_max)
    if plan is None:
        assert copies_max < len(fleet[1])
        return
    assert_sound(plan, fleet)
    assert plan.copies().get(plan.root, 0.0) <= copies_max * (1 + 1e-9)
    spare = [stripe for stripe in plan.stripes if stripe.spare]
    if spare and all(stripe.spare < 1 for stripe in spare):
        straight = sum(stripe.spare for stripe in spare)
        more = sum(stripe.spare * (len(stripe.tree.children(plan.root)) - 1) for stripe in spare)
        assert straight <= (copies_max - 1) / (len(fleet[1]) - 1) * (1 + 1e-9)
        assert 1 + more <= copies_max * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(fleets())
def test_a_seed_that_may_send_only_one_copy_sends_nothing_directly(fleet: Fleet) -> None:
    plan = plan_at_most(PlanId(1), JOB, *fleet, 1.0)
    if plan is not None:
        assert not any(stripe.spare for stripe in plan.stripes)
        assert all(len(stripe.tree.children(plan.root)) <= 1 for stripe in plan.stripes)
