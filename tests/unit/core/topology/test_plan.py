"""Plans as values: their invariants."""

from dataclasses import replace

import pytest

from echo2d.core.base.ids import PeerId
from echo2d.core.topology.planner import plan_at_most, plan_auto, plan_chains, plan_star
from tests.support.plans import ABCD, JOB, ONE, SEED, facts


def test_a_plan_that_misses_a_peer_fails_its_check() -> None:
    plan = plan_chains(ONE, JOB, SEED, ABCD, 1)
    with pytest.raises(AssertionError):
        replace(plan, peers=(*plan.peers, facts("e"))).check()


def test_a_peer_that_only_receives_has_no_children() -> None:
    plan = plan_chains(ONE, JOB, SEED, ABCD, 1)
    mute = tuple(replace(one, receive_only=one.peer == "b") for one in plan.peers)
    with pytest.raises(AssertionError):
        replace(plan, peers=mute).check()


def test_a_tree_is_walked_from_the_root() -> None:
    tree = plan_chains(ONE, JOB, SEED, ABCD, 1).stripes[0].tree
    assert tree.downwards() == ["seed", "a", "b", "c", "d"]
    assert tree.depths() == {"seed": 0, "a": 1, "b": 2, "c": 3, "d": 4}
    assert tree.children(PeerId("d")) == ()


def test_a_plan_says_how_many_copies_each_peer_sends() -> None:
    assert plan_chains(ONE, JOB, SEED, ABCD, 2).copies() == {
        "seed": 1.0,
        "a": 1.0,
        "b": 0.5,
        "c": 1.0,
        "d": 0.5,
    }


def test_only_trees_that_measurements_shaped_depend_on_rates() -> None:
    """Where every peer relays a stripe, the trees are the same at any rate."""
    assert not plan_star(ONE, JOB, SEED, ABCD).depends_on_rates
    assert not plan_auto(ONE, JOB, SEED, ABCD).depends_on_rates
    assert plan_chains(ONE, JOB, SEED, ABCD, 2).depends_on_rates
    assert plan_auto(ONE, JOB, SEED, [facts(f"p{number}") for number in range(60)]).depends_on_rates


def test_the_directly_sent_share_depends_on_rates() -> None:
    plan = plan_at_most(ONE, JOB, SEED, ABCD, 1.0)
    assert plan is not None
    assert plan.depends_on_rates


@pytest.mark.parametrize("wrong", [-0.1, 1.1])
def test_a_spare_share_lies_between_zero_and_one(wrong: float) -> None:
    plan = plan_star(ONE, JOB, SEED, ABCD)
    with pytest.raises(AssertionError):
        replace(plan, stripes=(replace(plan.stripes[0], spare=wrong),)).check()


def test_weights_of_stripes_add_up_to_one() -> None:
    plan = plan_star(ONE, JOB, SEED, ABCD)
    with pytest.raises(AssertionError):
        replace(plan, stripes=(replace(plan.stripes[0], weight=0.9),)).check()
