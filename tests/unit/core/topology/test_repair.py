"""Plans that lose a peer or gain one."""

import pytest

from echo2d.core.base.ids import PeerId
from echo2d.core.topology.edges import changed_peers
from echo2d.core.topology.planner import plan_auto, plan_chains, plan_star
from echo2d.core.topology.repair import SOURCES_MAX, join, repair
from tests.support.plans import ABCD, JOB, MB, ONE, SEED, facts, order


def test_a_repair_moves_the_orphans_up_and_nothing_else() -> None:
    plan = plan_chains(ONE, JOB, SEED, ABCD, 2)
    mended = repair(plan, PeerId("b"))
    mended.check()
    assert mended.generation == plan.generation + 1
    assert [order(mended, stripe) for stripe in (0, 1)] == ["acd", "cda"]
    assert changed_peers(plan, mended) == {"a", "c"}


def test_a_newcomer_is_attached_to_peers_with_spare_uplink() -> None:
    plan = plan_chains(ONE, JOB, SEED, ABCD, 1)
    grown = join(plan, facts("e"))
    grown.check()
    assert grown.stripes[0].tree.parents[PeerId("e")] == "d"
    assert changed_peers(plan, grown) == {"d", "e"}
    star = join(plan_star(ONE, JOB, SEED, ABCD), facts("e"))
    assert star.stripes[0].tree.parents[PeerId("e")] == "seed"


@pytest.mark.parametrize("shape", ["star", "chain"])
def test_a_newcomer_fetches_from_complete_peers_and_not_from_the_root(
    shape: str,
) -> None:
    plan = (
        plan_star(ONE, JOB, SEED, ABCD) if shape == "star" else plan_chains(ONE, JOB, SEED, ABCD, 1)
    )
    holders = {one.peer for one in ABCD}
    grown = join(join(plan, facts("e"), holders), facts("f"), holders)
    grown.check()
    assert {peer: set(sources) for peer, sources in grown.sources.items()} == {
        "e": holders,
        "f": holders,
    }
    assert grown.stripes[0].tree.parents[PeerId("e")] in holders
    assert changed_peers(join(plan, facts("e")), join(plan, facts("e"), holders)) >= holders | {"e"}
    assert repair(repair(grown, PeerId("a")), PeerId("f")).sources == {"e": ("b", "c", "d")}


def test_complete_peers_that_are_slower_than_the_plan_are_no_sources() -> None:
    peers = [facts("a", 0.1 * MB), facts("b"), facts("c", receive_only=True)]
    plan = plan_chains(ONE, JOB, SEED, peers, 1)
    assert join(plan, facts("e"), {PeerId("a"), PeerId("c")}).sources == {}
    assert join(plan, facts("e"), {one.peer for one in peers}).sources == {"e": ("b", "a")}


def test_a_newcomer_has_a_limited_number_of_sources_with_the_most_spare_uplink() -> None:
    peers = [facts(f"p{number:02}", (10 + number) * MB) for number in range(2 * SOURCES_MAX)]
    plan = join(plan_chains(ONE, JOB, SEED, peers, 1), facts("e"), {one.peer for one in peers})
    assert plan.sources[PeerId("e")] == tuple(one.peer for one in reversed(peers[SOURCES_MAX:]))


def test_orphans_are_not_attached_to_a_newcomer_even_if_it_has_the_most_spare_uplink() -> None:
    """It lacks what was sent before it came; likewise whoever was made a leaf."""
    plan = join(
        plan_auto(ONE, JOB, facts("seed", 40 * MB), [facts(name, 20 * MB) for name in "abcdef"]),
        facts("n", 90 * MB),
    )
    for lost in "ab":
        plan = repair(plan, PeerId(lost))
        plan.check()
    assert plan.joined == {"n"}
    assert "n" not in plan.copies()
    assert repair(plan, PeerId("n")).joined == frozenset()


def test_another_peer_replaces_a_lost_relay_of_many_children() -> None:
    """In a plan in which everybody relays: its own stripe gets a new relay, and the others lose a leaf."""
    plan = plan_auto(ONE, JOB, SEED, ABCD)
    mended = repair(plan, PeerId("b"))
    mended.check()
    firsts = [stripe.tree.children(SEED.peer) for stripe in mended.stripes]
    assert firsts[0] == ("a",)
    assert len(firsts[1]) == 1
    assert firsts[2:] == [("c",), ("d",), ("a", "c", "d")]


def test_a_newcomer_is_a_leaf_of_every_stripe() -> None:
    grown = join(plan_auto(ONE, JOB, SEED, ABCD), facts("e", 90 * MB))
    grown.check()
    assert "e" not in grown.copies()


def test_a_leaf_that_cannot_send_gets_no_place_above_a_newcomer() -> None:
    plan = plan_auto(ONE, JOB, SEED, [facts("a"), facts("m", receive_only=True)])
    mended = repair(join(plan, facts("n")), PeerId("a"))
    mended.check()
    assert mended.stripes[0].tree.parents == {"n": "seed", "m": "n"}


def test_peers_that_cannot_be_dialled_never_share_an_edge() -> None:
    hidden = [facts(name, open_=False) for name in "xyz"]
    plan = plan_chains(ONE, JOB, SEED, [facts("a"), *hidden, facts("b")], 2)
    plan.check()
    for lost in ("a", "b"):
        plan = repair(plan, PeerId(lost))
        plan.check()
    assert plan.stripes[0].tree.parents == dict.fromkeys("xyz", "seed")


def test_the_children_of_a_lost_relay_are_distributed_and_the_seed_sends_no_more() -> None:
    peers = [
        facts(name, uplink * MB)
        for name, uplink in zip("abcdef", (40, 20, 20, 10, 10, 10), strict=True)
    ]
    plan = plan_auto(ONE, JOB, facts("seed", 40 * MB), peers)
    assert plan.shape == "relay"
    mended = repair(plan, PeerId("a"))
    mended.check()
    before, after = plan.copies(), mended.copies()
    assert after[SEED.peer] <= before[SEED.peer] + 1e-9
    assert all(after.get(peer, 0.0) - before.get(peer, 0.0) < 1.5 for peer in after)


def test_a_peer_that_only_receives_replaces_no_relay_if_another_can() -> None:
    peers = [facts("a"), facts("m", receive_only=True), facts("b")]
    mended = repair(plan_chains(ONE, JOB, SEED, peers, 1), PeerId("a"))
    mended.check()
    assert mended.stripes[0].tree.children(PeerId("m")) == ()


def test_a_newcomer_is_never_attached_to_a_peer_that_only_receives() -> None:
    plan = plan_chains(ONE, JOB, SEED, [facts("m", 90 * MB, receive_only=True)], 1)
    assert join(plan, facts("e")).stripes[0].tree.parents[PeerId("e")] == "seed"
