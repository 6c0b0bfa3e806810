"""Plans for up to SMALL_SWARM peers: every peer that can send relays a stripe, at any rates."""

from collections import Counter
from dataclasses import replace

import pytest

from echo2d.core.base.ids import PeerId
from echo2d.core.topology.plan import SMALL_SWARM, STRIPES_MAX, PeerFacts, Plan, Stripe
from echo2d.core.topology.planner import plan_again, plan_auto
from tests.support.plans import ABCD, JOB, MB, ONE, SEED, facts


def planned(peers: list[PeerFacts], seed: PeerFacts = SEED) -> Plan:
    plan = plan_auto(ONE, JOB, seed, peers)
    plan.check()
    return plan


def ordinary(plan: Plan) -> list[Stripe]:
    return [stripe for stripe in plan.stripes if not stripe.spare]


def relays(stripes: list[Stripe]) -> list[str]:
    """Of each stripe, the only peer to which the seed sends it."""
    firsts = [stripe.tree.children(stripe.tree.root) for stripe in stripes]
    assert all(len(first) == 1 for first in firsts)
    return [first[0] for first in firsts]


def thirds(plan: Plan) -> list[tuple[str, str]]:
    """Of each stripe of a relay that cannot be dialled: the relay and the peer below that sends too."""
    found: list[tuple[str, str]] = []
    for stripe in ordinary(plan):
        (relay,) = stripe.tree.children(plan.root)
        found += [(relay, peer) for peer in stripe.tree.below if peer not in (relay, plan.root)]
    return found


def test_every_peer_that_can_send_relays_a_stripe() -> None:
    plan = planned(ABCD)
    assert relays(ordinary(plan)) == ["a", "b", "c", "d"]
    assert {stripe.tree.depths()[PeerId("a")] for stripe in ordinary(plan)[1:]} == {2}


@pytest.mark.parametrize("uplinks", [(None,) * 4, (1.0, 1e3, 1e6, 1e9), (None, 5e6, 1e5, 2e8)])
def test_trees_of_a_small_swarm_are_the_same_at_any_rates(
    uplinks: tuple[float | None, ...],
) -> None:
    peers = [replace(one, uplink=rate) for one, rate in zip(ABCD, uplinks, strict=True)]
    assert [stripe.tree for stripe in planned(peers).stripes] == [
        stripe.tree for stripe in planned(ABCD).stripes
    ]


def test_frames_that_no_relay_can_take_are_sent_directly_to_every_peer() -> None:
    *_, last = planned(ABCD, facts("seed", 100 * MB)).stripes
    assert last.tree.children(SEED.peer) == ("a", "b", "c", "d")
    assert last.spare == 1
    assert last.weight > 0.5


def test_weights_predict_what_each_relay_can_pass_on() -> None:
    """The seed has 20 MB/s: relays pass 3 and 1 on to one child each, and 16 go to two."""
    plan = planned([facts("a", 3 * MB), facts("b", 1 * MB)], facts("seed", 20 * MB))
    assert [stripe.weight for stripe in plan.stripes] == pytest.approx([3 / 12, 1 / 12, 8 / 12])


def test_a_seed_that_is_slower_than_its_relays_sends_nothing_directly() -> None:
    plan = planned([facts("a", 30 * MB), facts("b", 10 * MB)], facts("seed", 4 * MB))
    assert [stripe.weight for stripe in plan.stripes] == pytest.approx([0.75, 0.25, 0.0])


def test_a_slow_uplink_carries_as_little_as_it_can() -> None:
    plan = planned([*ABCD, facts("slow", 0.1 * MB)])
    assert plan.copies()[PeerId("slow")] < 0.05
    assert plan.predicted_s < 1.05 * plan.bound_s


@pytest.mark.parametrize(("uplink", "receive_only"), [(10.0 * MB, True), (0.0, False)])
def test_the_plan_is_a_star_if_no_peer_can_send(uplink: float, receive_only: bool) -> None:
    plan = planned([facts(name, uplink, receive_only=receive_only) for name in "abcd"])
    assert (plan.shape, len(plan.stripes)) == ("star", 1)


def test_a_plan_for_a_single_peer_is_a_star() -> None:
    plan = planned(ABCD[:1])
    assert (plan.shape, len(plan.stripes)) == ("star", 1)


@pytest.mark.parametrize(("uplink", "receive_only"), [(10.0 * MB, True), (0.0, False)])
def test_a_peer_that_cannot_send_relays_nothing(uplink: float, receive_only: bool) -> None:
    plan = planned([*ABCD, facts("m", uplink, receive_only=receive_only)])
    assert relays(ordinary(plan)) == ["a", "b", "c", "d"]
    assert not any(stripe.tree.children(PeerId("m")) for stripe in plan.stripes)


def test_a_plan_exists_for_a_seed_without_uplink() -> None:
    """Its rate may come from a measurement that went wrong."""
    assert relays(ordinary(planned(ABCD, facts("seed", 0.0)))) == ["a", "b", "c", "d"]


# --- peers that cannot be dialled


def test_one_relay_that_cannot_be_dialled_is_treated_like_the_others() -> None:
    """It can dial everybody else."""
    plan = planned([*ABCD, facts("x", open_=False)])
    assert relays(ordinary(plan)) == ["a", "b", "c", "d", "x"]
    assert thirds(plan) == []


def test_a_relay_behind_nat_has_a_stripe_through_each_peer_that_can_be_dialled() -> None:
    plan = planned([*map(facts, "abc"), *(facts(name, open_=False) for name in "xyz")])
    assert Counter(thirds(plan)) == Counter((relay, third) for relay in "xyz" for third in "abc")


def test_peers_reach_each_other_through_the_uplink_behind_nat() -> None:
    plan = planned([facts("a"), facts("b"), *(facts(name, open_=False) for name in "xyz")])
    assert {(relay, third) for relay, third in thirds(plan) if relay in "ab"} == {
        ("a", "x"),
        ("b", "y"),
    }


def test_the_third_peer_serves_only_peers_that_the_relay_cannot_reach() -> None:
    plan = planned([facts("a"), facts("b"), *(facts(name, open_=False) for name in "xyz")])
    for stripe in ordinary(plan):
        (relay,) = stripe.tree.children(plan.root)
        if relay in "xyz":
            (third,) = (one for one in stripe.tree.children(relay) if stripe.tree.children(one))
            assert set(stripe.tree.children(relay)) == {"a", "b"}
            assert set(stripe.tree.children(third)) == set("xyz") - {relay}


def test_a_hidden_relay_has_a_spare_stripe_in_which_the_seed_serves_the_others() -> None:
    plan = planned([facts("a"), facts("b"), *(facts(name, open_=False) for name in "xyz")])
    halves = [stripe.tree for stripe in plan.stripes if stripe.spare][:-1]
    assert [tree.children(PeerId(relay)) for tree, relay in zip(halves, "xyz", strict=True)] == [
        ("a", "b")
    ] * 3
    assert all(set(tree.children(SEED.peer)) == set("xyz") for tree in halves)


def test_the_seed_serves_all_peers_if_none_can_be_dialled() -> None:
    plan = planned([facts(name, open_=False) for name in "wxyz"])
    assert (plan.shape, len(plan.stripes)) == ("star", 1)


def test_a_silent_peer_behind_nat_counts_as_a_peer_to_reach() -> None:
    """The only relay behind NAT cannot reach it, so it needs a third as well."""
    plan = planned(
        [facts("a"), facts("x", open_=False), facts("m", open_=False, receive_only=True)]
    )
    assert thirds(plan) == [("x", "a")]


@pytest.mark.parametrize("hidden", [0, 1, 2, 10, 20, 30, 39, 40])
def test_the_number_of_stripes_is_limited(hidden: int) -> None:
    peers = [facts(f"p{number:02}", open_=number >= hidden) for number in range(SMALL_SWARM)]
    plan = planned(peers)
    assert len(plan.stripes) <= STRIPES_MAX
    assert hidden == SMALL_SWARM or len(plan.stripes) > SMALL_SWARM


def test_third_peers_are_used_alike_if_stripes_are_short() -> None:
    peers = [facts(f"p{number:02}", open_=number >= 12) for number in range(24)]
    used = Counter(third for _, third in thirds(planned(peers)))
    assert len(used) == 12
    assert max(used.values()) - min(used.values()) <= 1


# --- from one version to the next


def test_a_plan_for_unchanged_peers_is_not_made_again() -> None:
    assert plan_again(planned(ABCD), ONE, JOB, SEED, ABCD) is None


def test_the_same_links_stay_open_whichever_peer_is_named_first() -> None:
    closed = [facts(name, open_=False) for name in "xyz"]
    one, other = planned([*ABCD, *closed]), planned([*reversed(closed), *reversed(ABCD)])
    assert one.shares.keys() == other.shares.keys()


def test_few_peers_relay_each_stripe_above_a_small_swarm() -> None:
    peers = [facts(f"p{number:02}") for number in range(SMALL_SWARM + 1)]
    assert len(planned(peers[:-1]).stripes) == SMALL_SWARM + 1
    assert len(planned(peers).stripes) <= 16
