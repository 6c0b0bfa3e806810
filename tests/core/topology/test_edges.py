"""What each peer is told of a plan."""

from dataclasses import replace

from echo2d.core.base.ids import PeerId
from echo2d.core.protocol.control_messages import Address
from echo2d.core.topology.edges import PACE_MIN, edge_secret, edges_for
from echo2d.core.topology.plan import Stripe, Tree
from echo2d.core.topology.planner import plan_chains
from echo2d.core.topology.repair import join
from tests.support.plans import ABCD, JOB, MB, ONE, SEED, facts


def secret(one: PeerId, other: PeerId) -> bytes:
    return edge_secret(bytes(32), one, other)


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
    assert [peer.dial for peers in dials for peer in peers if peer.peer in ("a", "b")] == [
        True,
        False,
    ]


def test_a_pace_is_shared_over_the_children_by_what_they_get() -> None:
    """Nobody else is sent to more slowly, and no share is so small that a link seems dead."""
    one, other = (Tree(SEED.peer, {PeerId(child): PeerId(parent) for child, parent in edges}) for edges in (
        (("a", "seed"), ("b", "a"), ("c", "a")), (("a", "seed"), ("b", "a"), ("c", "b")),
    ))  # fmt: skip
    peers = (SEED, replace(facts("a"), pace=3.0 * MB), facts("b"), facts("c"))
    plan = replace(
        plan_chains(ONE, JOB, SEED, peers[1:], 1),
        peers=peers,
        stripes=(Stripe(0.5, one), Stripe(0.5, other)),
    )
    plan.check()
    told = {edge.peer: edge.pace for edge in edges_for(plan, PeerId("a"), secret).peers}
    assert told == {"b": 2.0 * MB, "c": 1.0 * MB, "seed": None}
    slow = replace(plan, peers=(SEED, replace(facts("a"), pace=1.0), *peers[2:]))
    assert edges_for(slow, PeerId("a"), secret).peers[0].pace == PACE_MIN
