"""Plans: their shapes, what they cost, how they are mended, and what each peer is told."""

from dataclasses import replace

import pytest

from echo2d.core.ids import FormId, PeerId, PlanId
from echo2d.core.messages import Address
from echo2d.core.topology import (
    Job,
    PeerFacts,
    Plan,
    assume_usual,
    bound_s,
    changed_peers,
    edge_secret,
    edges_for,
    join,
    plan_auto,
    plan_chains,
    plan_star,
    repair,
)

MB = 10**6
JOB = Job(FormId("f" * 32), 1000 * MB, MB)
ONE = PlanId(1)


def facts(
    name: str, uplink: float | None = 10 * MB, downlink: float | None = 10 * MB, *, open_: bool = True
) -> PeerFacts:
    return PeerFacts(PeerId(name), uplink, downlink, Address(name, 1) if open_ else None)


def secret(one: PeerId, other: PeerId) -> bytes:
    return edge_secret(bytes(32), one, other)


SEED = facts("seed")
ABCD = [facts(name) for name in "abcd"]


def order(plan: Plan, stripe: int = 0) -> str:
    depths = plan.stripes[stripe].tree.depths()
    peers: list[PeerId] = sorted(depths.keys() - {plan.root}, key=lambda peer: depths[peer])
    return "".join(peers)


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


def test_chains_are_rotated_so_that_everyone_sends_about_the_same() -> None:
    plan = plan_chains(ONE, JOB, SEED, ABCD, 2)
    plan.check()
    assert [order(plan, stripe) for stripe in (0, 1)] == ["abcd", "cdab"]
    assert [stripe.weight for stripe in plan.stripes] == [0.5, 0.5]


def test_there_are_no_more_chains_than_peers() -> None:
    assert len(plan_chains(ONE, JOB, SEED, ABCD[:1], 4).stripes) == 1
    empty = plan_chains(ONE, JOB, SEED, [], 4)
    empty.check()
    assert empty.predicted_s == empty.bound_s == 0


def test_the_faster_shape_is_taken() -> None:
    assert plan_auto(ONE, JOB, SEED, ABCD, 1).shape == "chain"
    assert plan_auto(ONE, JOB, facts("seed", 100 * MB), ABCD, 1).shape == "star"


def test_a_slow_uplink_sends_nothing_in_a_chain() -> None:
    plan = plan_chains(ONE, JOB, SEED, [*ABCD, facts("slow", 1 * MB)], 2)
    plan.check()
    assert all(stripe.tree.children(PeerId("slow")) == () for stripe in plan.stripes)
    assert plan.predicted_s < 110


def test_a_link_that_was_not_measured_counts_as_usual() -> None:
    plan = plan_chains(ONE, JOB, SEED, [facts("a", None, None), facts("b", None, None)], 1)
    assert plan.bound_s == 100


def test_who_was_never_measured_counts_as_the_median_of_those_who_were() -> None:
    peers = [facts("a", 1 * MB), facts("b", None), facts("c", 3 * MB), facts("d", 2 * MB)]
    assert [each.uplink for each in assume_usual(peers)] == [1 * MB, 2 * MB, 3 * MB, 2 * MB]
    nothing = [facts("a", None), facts("b", None)]
    assert assume_usual(nothing) == nothing


def test_the_bound_is_the_narrowest_of_three() -> None:
    assert bound_s(JOB, facts("seed", 1 * MB), ABCD) == 1000
    assert bound_s(JOB, SEED, [*ABCD, facts("e", downlink=2 * MB)]) == 500
    assert bound_s(JOB, SEED, [facts("a", 5 * MB), facts("b", 1 * MB)]) == pytest.approx(125)


def test_a_repair_moves_the_orphans_up_and_nothing_else() -> None:
    plan = plan_chains(ONE, JOB, SEED, ABCD, 2)
    mended = repair(plan, PeerId("b"))
    mended.check()
    assert mended.generation == plan.generation + 1
    assert [order(mended, stripe) for stripe in (0, 1)] == ["acd", "cda"]
    assert changed_peers(plan, mended) == {"a", "c"}


def test_a_newcomer_hangs_on_where_there_is_uplink_to_spare() -> None:
    plan = plan_chains(ONE, JOB, SEED, ABCD, 1)
    grown = join(plan, facts("e"))
    grown.check()
    assert grown.stripes[0].tree.parents[PeerId("e")] == "d"
    assert changed_peers(plan, grown) == {"d", "e"}
    star = join(plan_star(ONE, JOB, SEED, ABCD), facts("e"))
    assert star.stripes[0].tree.parents[PeerId("e")] == "seed"


def test_peers_that_nobody_can_dial_never_share_an_edge() -> None:
    hidden = [facts(name, open_=False) for name in "xyz"]
    plan = plan_chains(ONE, JOB, SEED, [facts("a"), *hidden, facts("b")], 2)
    plan.check()
    for lost in ("a", "b"):
        plan = repair(plan, PeerId(lost))
        plan.check()
    assert plan.stripes[0].tree.parents == dict.fromkeys("xyz", "seed")


def test_a_plan_that_misses_a_peer_fails_its_check() -> None:
    plan = plan_chains(ONE, JOB, SEED, ABCD, 1)
    with pytest.raises(AssertionError):
        replace(plan, peers=(*plan.peers, facts("e"))).check()


def test_both_ends_of_an_edge_are_told_the_same() -> None:
    plan = plan_chains(ONE, JOB, SEED, ABCD, 1)
    upper, lower = (edges_for(plan, PeerId(name), secret) for name in "ab")
    assert [peer.peer for peer in upper.peers] == ["b", "seed"]
    to_child, to_parent = upper.peers[0], lower.peers[-1]
    assert (to_child.dial, to_child.address) == (False, None)
    assert (to_parent.dial, to_parent.address) == (True, Address("a", 1))
    assert to_child.secret == to_parent.secret != upper.peers[1].secret
    assert upper.stripes[0].parent == "seed"
    assert upper.stripes[0].children == ("b",)


def test_the_parent_dials_a_child_that_has_an_address_if_it_has_none_itself() -> None:
    plan = plan_chains(ONE, JOB, SEED, [facts("a"), facts("x", open_=False)], 1)
    plan = join(plan, facts("b"))
    plan = replace(plan, stripes=(replace(plan.stripes[0], tree=replace(plan.stripes[0].tree, parents={
        PeerId("a"): SEED.peer, PeerId("x"): PeerId("a"), PeerId("b"): PeerId("x"),
    })),))  # fmt: skip
    plan.check()
    told = {peer.peer: peer for peer in edges_for(plan, PeerId("x"), secret).peers}
    assert told[PeerId("a")].dial
    assert told[PeerId("b")].dial
    assert told[PeerId("b")].address == Address("b", 1)


def test_of_two_peers_that_are_each_others_parents_one_dials() -> None:
    plan = plan_chains(ONE, JOB, SEED, ABCD[:2], 2)
    dials = [edges_for(plan, PeerId(name), secret).peers for name in "ab"]
    assert [peer.dial for peers in dials for peer in peers if peer.peer in ("a", "b")] == [True, False]
