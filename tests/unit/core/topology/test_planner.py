"""Shapes of plans, and that the chosen one is near the bound."""

from cProfile import Profile
from dataclasses import replace

import pytest

from echo2d.core.base.ids import FormId, PeerId, PlanId
from echo2d.core.protocol.control_messages import Address
from echo2d.core.topology.plan import SMALL_SWARM, Job, Plan
from echo2d.core.topology.planner import (
    NEAR,
    SAME_JOB,
    plan_again,
    plan_auto,
    plan_chains,
    plan_star,
)
from echo2d.core.topology.repair import join
from tests.support.plans import ABCD, JOB, MB, ONE, SEED, facts, order

# More than get a stripe each.
MANY = [facts(f"p{number:02}") for number in range(SMALL_SWARM + 8)]


def test_a_star_is_one_hop_deep() -> None:
    plan = plan_star(ONE, JOB, SEED, ABCD)
    plan.check()
    assert plan.stripes[0].tree.children(SEED.peer) == ("a", "b", "c", "d")
    assert plan.predicted_s == pytest.approx(400 + 0.4)
    assert plan.bound_s == 100


def test_a_chain_takes_as_long_as_one_copy_and_a_frame_per_hop() -> None:
    plan = plan_chains(ONE, JOB, SEED, ABCD, 1)
    plan.check()
    assert order(plan) == "abcd"
    assert plan.predicted_s == pytest.approx(100 + 0.4)


def test_small_differences_do_not_change_the_order_of_a_chain() -> None:
    """The links between versions stay; a peer that is twice as fast goes first."""
    measured = [facts("a", 9.0 * MB), facts("b", 10.5 * MB), facts("c", 25 * MB)]
    assert order(plan_chains(ONE, JOB, SEED, measured, 1)) == "cab"


def test_chains_are_rotated_so_that_all_peers_send_about_the_same() -> None:
    plan = plan_chains(ONE, JOB, SEED, ABCD, 2)
    plan.check()
    assert [order(plan, stripe) for stripe in (0, 1)] == ["abcd", "cdab"]
    assert [stripe.weight for stripe in plan.stripes] == [0.5, 0.5]


def test_there_are_no_more_chains_than_peers() -> None:
    assert len(plan_chains(ONE, JOB, SEED, ABCD[:1], 4).stripes) == 1
    empty = plan_chains(ONE, JOB, SEED, [], 4)
    empty.check()
    assert empty.predicted_s == empty.bound_s == 0


def test_a_slow_uplink_sends_nothing_in_a_chain() -> None:
    plan = plan_chains(ONE, JOB, SEED, [*ABCD, facts("slow", 1 * MB)], 2)
    plan.check()
    assert all(stripe.tree.children(PeerId("slow")) == () for stripe in plan.stripes)
    assert plan.predicted_s < 110


def test_peers_that_are_alike_pass_one_copy_on() -> None:
    """Behind the seed's uplink, which all of them together exceed by far."""
    plan = plan_auto(ONE, JOB, SEED, [facts(f"p{number}") for number in range(8)])
    plan.check()
    assert plan.copies()[SEED.peer] == pytest.approx(1.0)
    assert plan.predicted_s < 1.02 * plan.bound_s


def test_a_plan_stays_while_little_has_changed() -> None:
    last = plan_auto(ONE, JOB, SEED, MANY)
    faster = [
        replace(one, uplink=NEAR * 10 * MB, address=Address("elsewhere", 2))
        for one in reversed(MANY)
    ]
    larger = replace(JOB, form=FormId("e" * 32), wire_bytes=int(SAME_JOB * JOB.wire_bytes))
    plan = plan_again(last, PlanId(2), larger, SEED, faster)
    assert plan is not None
    plan.check()
    assert (plan.plan_id, plan.job, plan.shape, plan.stripes) == (
        2,
        larger,
        last.shape,
        last.stripes,
    )
    assert plan.predicted_s == pytest.approx(SAME_JOB * last.predicted_s, rel=0.01)
    assert {one.address for one in plan.peers[1:]} == {Address("elsewhere", 2)}
    even_faster = [replace(one, uplink=NEAR * NEAR * 10 * MB) for one in MANY]
    assert plan_again(plan, PlanId(3), JOB, SEED, even_faster) is None, "small changes add up"


def test_a_plan_is_made_again_when_something_has_changed() -> None:
    last = plan_auto(ONE, JOB, SEED, MANY)
    others = {
        "a peer came": [*MANY, facts("e")],
        "a peer left": MANY[1:],
        "a rate is known now": [replace(MANY[0], latency_s=None), *MANY[1:]],
        "a rate is another": [replace(MANY[0], uplink=12 * MB), *MANY[1:]],
        "a peer cannot be dialled": [replace(MANY[0], address=None), *MANY[1:]],
        "a peer only receives": [replace(MANY[0], receive_only=True), *MANY[1:]],
    }
    for peers in others.values():
        assert plan_again(last, PlanId(2), JOB, SEED, peers) is None
    assert plan_again(last, PlanId(2), JOB, facts("other"), MANY) is None
    for job in (replace(JOB, frame_bytes=1), replace(JOB, wire_bytes=JOB.wire_bytes // 100)):
        assert plan_again(last, PlanId(2), job, SEED, MANY) is None
    mended = join(last, facts("e"))
    assert plan_again(mended, PlanId(2), JOB, SEED, [*MANY, facts("e")]) is None


def mixed(count: int) -> list[float]:
    """Uplinks of 20 to 500 Mbit/s."""
    return [(2.5, 5, 12.5, 25, 62.5)[number * 7 % 5] * MB for number in range(count)]


def planned(
    seed: float, uplinks: list[float], wire_bytes: int = 100 << 20, frame_bytes: int = 64 << 10
) -> Plan:
    peers = [
        facts(f"p{number}", uplink, 1000 * MB, latency_s=0.01)
        for number, uplink in enumerate(uplinks)
    ]
    job = Job(FormId("f" * 32), wire_bytes, frame_bytes)
    plan = plan_auto(ONE, job, facts("seed", seed, latency_s=0.01), peers)
    plan.check()
    return plan


def test_unequal_uplinks_are_used_by_their_weight() -> None:
    """320 Mbit/s to 320, 320, 160, 160, 80, 80, 40, 40: neither a star nor a chain comes near."""
    plan = planned(40 * MB, [mbit / 8 * MB for mbit in (320, 160, 160, 80, 80, 40, 40)])
    assert plan.shape == "relay"
    assert plan.predicted_s < 1.1 * plan.bound_s
    star = plan_star(ONE, plan.job, plan.peers[0], plan.peers[1:])
    chains = plan_chains(ONE, plan.job, plan.peers[0], plan.peers[1:], 4)
    assert min(star.predicted_s, chains.predicted_s) > 2 * plan.predicted_s


def test_a_slow_uplink_in_a_large_swarm_carries_nothing() -> None:
    plan = planned(12.5 * MB, [12.5 * MB] * SMALL_SWARM + [0.625 * MB])
    assert plan.predicted_s < 1.1 * plan.bound_s
    assert "p40" not in plan.copies()


def test_a_seed_with_spare_uplink_also_sends_directly() -> None:
    """The peers together send less than the seed alone could: only both together reach the bound."""
    plan = planned(50 * MB, [5 * MB] * 10, wire_bytes=400 << 20)
    assert plan.predicted_s < 1.1 * plan.bound_s
    assert plan.copies()[SEED.peer] > 4


def test_the_seed_of_a_large_swarm_sends_to_the_first_peers_of_every_stripe_and_not_to_all() -> (
    None
):
    """A frame to everybody would keep it from feeding the stripes for as long as a hundred others take."""
    plan = planned(125 * MB, mixed(100), wire_bytes=400 << 20)
    assert plan.predicted_s < 1.1 * plan.bound_s
    assert 4 < plan.copies()[SEED.peer] < 7
    assert all(len(stripe.tree.children(SEED.peer)) < 10 for stripe in plan.stripes)


def test_peers_of_a_large_swarm_that_receive_slowly_are_leaves() -> None:
    slow = facts("slow", 100 * MB, 1 * MB)
    plan = plan_auto(ONE, JOB, SEED, [*MANY, slow])
    assert slow.peer not in plan.copies()
    assert plan.predicted_s < 1.02 * plan.bound_s


def test_peers_that_only_receive_are_leaves_too() -> None:
    plan = plan_auto(
        ONE, JOB, SEED, [facts("a"), *(facts(name, receive_only=True) for name in "xyz")]
    )
    plan.check()
    assert set(plan.copies()) <= {"seed", "a"}


@pytest.mark.parametrize("hidden", ["bdfh", "abcd", "abcdefgh"])
def test_a_plan_is_near_the_bound_if_half_of_the_peers_cannot_be_dialled(hidden: str) -> None:
    peers = [facts(name, open_=name not in hidden) for name in "abcdefgh"]
    plan = plan_auto(ONE, JOB, SEED, peers)
    plan.check()
    assert plan.predicted_s < (1.1 if len(hidden) == 4 else 8.1) * plan.bound_s


def test_noise_in_rates_does_not_change_which_peers_relay() -> None:
    """Links stay open between versions."""
    one = planned(12.5 * MB, [12.5 * MB] * 48)
    other = planned(12.5 * MB, [12.4 * MB, 12.6 * MB] * 24)
    assert [stripe.tree.parents for stripe in one.stripes] == [
        stripe.tree.parents for stripe in other.stripes
    ]


def test_the_same_facts_of_peers_give_the_same_plan() -> None:
    assert planned(50 * MB, mixed(31)) == planned(50 * MB, mixed(31))


def test_each_of_a_thousand_peers_costs_no_more_than_each_of_250() -> None:
    """In calls, which are the same on every machine. The thousand take 0.03 s of a processor."""
    calls = []
    for peers in (250, 1000):
        counted = Profile()
        plan = counted.runcall(planned, 50 * MB, mixed(peers), 10**9, 256 << 10)
        assert plan.predicted_s < 1.15 * plan.bound_s
        calls.append(sum(entry.callcount for entry in counted.getstats()) / peers)
    assert calls[1] < 1.05 * calls[0]


def test_a_large_swarm_of_slow_peers_next_to_a_fast_seed_is_a_star() -> None:
    """Every carrier would have less than half a child."""
    peers = [facts(f"p{index}", 0.1 * MB) for index in range(64)]
    plan = plan_auto(ONE, JOB, facts("seed", 10_000 * MB), peers)
    plan.check()
    assert plan.predicted_s < 1.1 * plan.bound_s
