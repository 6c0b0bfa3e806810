"""Plans as values: what they must hold."""

from dataclasses import replace

import pytest

from echo2d.core.base.ids import PeerId
from echo2d.core.topology.planner import plan_chains
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


def test_what_each_peer_sends() -> None:
    assert plan_chains(ONE, JOB, SEED, ABCD, 2).copies() == {
        "seed": 1.0,
        "a": 1.0,
        "b": 0.5,
        "c": 1.0,
        "d": 0.5,
    }
