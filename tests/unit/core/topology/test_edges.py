"""The part of a plan that each peer gets."""

from dataclasses import replace

from echo2d.core.base.ids import PeerId
from echo2d.core.protocol.control_messages import Address
from echo2d.core.topology.edges import edge_secret, edges_for
from echo2d.core.topology.planner import plan_auto, plan_chains, plan_star
from echo2d.core.topology.repair import join
from tests.support.plans import ABCD, JOB, ONE, SEED, facts


def secret(one: PeerId, other: PeerId) -> bytes:
    return edge_secret(bytes(32), one, other)


def test_both_ends_of_an_edge_get_the_same_facts() -> None:
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


def test_only_one_of_two_peers_that_are_each_others_parents_dials() -> None:
    plan = plan_chains(ONE, JOB, SEED, ABCD[:2], 2)
    dials = [edges_for(plan, PeerId(name), secret).peers for name in "ab"]
    assert [peer.dial for peers in dials for peer in peers if peer.peer in ("a", "b")] == [
        True,
        False,
    ]


def test_a_spare_stripe_is_marked_as_spare() -> None:
    """The root needs it to know which stripe takes what no other does."""
    plan = plan_auto(ONE, JOB, SEED, ABCD[:2])
    told = edges_for(plan, SEED.peer, secret).stripes
    assert [(stripe.parent, stripe.children, stripe.spare) for stripe in told] == [
        (None, ("a",), 0.0),
        (None, ("b",), 0.0),
        (None, ("a", "b"), 1.0),
    ]


def test_a_source_learns_of_the_newcomer_that_fetches_from_it() -> None:
    plan = join(plan_star(ONE, JOB, SEED, ABCD[:2]), facts("e"), {PeerId("a"), PeerId("b")})
    source, newcomer = (edges_for(plan, PeerId(name), secret) for name in "ae")
    assert "e" in [peer.peer for peer in source.peers]
    assert newcomer.sources == ("a", "b")
    assert {"a", "b"} <= {peer.peer for peer in newcomer.peers}
