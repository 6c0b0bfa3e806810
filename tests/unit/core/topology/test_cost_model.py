"""The cost of a plan: the bound, the prediction, and the defaults for rates that were not measured."""

import math
from dataclasses import replace

import pytest

from echo2d.core.base.ids import PeerId
from echo2d.core.topology.cost_model import (
    LATENCY_GUESS_S,
    RATE_GUESS,
    bound_s,
    fill_in,
    predicted_s,
)
from echo2d.core.topology.plan import Stripe, Tree
from tests.support.plans import ABCD, JOB, MB, SEED, facts


def test_an_unmeasured_rate_counts_as_the_usual_rate() -> None:
    """The median of the measured peers; the seed's own link says nothing about theirs."""
    peers = (
        facts("seed", 99 * MB),
        facts("a", 2 * MB),
        facts("b", 4 * MB),
        facts("c", 40 * MB),
        facts("d", None, None),
    )
    assert fill_in(peers)[4].uplink == 4 * MB
    assert fill_in(peers)[4].downlink == 10 * MB
    (alone,) = fill_in([facts("x", None, None, latency_s=None)])
    assert (alone.uplink, alone.downlink, alone.latency_s) == (
        RATE_GUESS,
        RATE_GUESS,
        LATENCY_GUESS_S,
    )


def test_unmeasured_downlinks_limit_no_plan() -> None:
    """All three could get 60 MB/s if they could take it in."""
    fast = [
        facts("seed", 100 * MB),
        *(
            facts(name, uplink, None)
            for name, uplink in (("a", 60 * MB), ("b", 10 * MB), ("c", 10 * MB))
        ),
    ]
    assert [one.downlink for one in fill_in(fast)[1:]] == [60 * MB, 60 * MB, 60 * MB]


def test_no_peer_is_thought_to_receive_more_slowly_than_it_sends() -> None:
    assert fill_in((SEED, facts("a", 50 * MB, None)))[1].downlink == 50 * MB


def test_the_bound_is_the_narrowest_of_three() -> None:
    assert bound_s(JOB, facts("seed", 1 * MB), ABCD) == 1000
    assert bound_s(JOB, SEED, [*ABCD, facts("e", downlink=2 * MB)]) == 500
    assert bound_s(JOB, SEED, [facts("a", 5 * MB), facts("b", 1 * MB)]) == pytest.approx(125)
    assert bound_s(JOB, SEED, []) == 0


def test_a_peer_that_only_receives_adds_no_uplink() -> None:
    assert bound_s(JOB, SEED, [facts("a"), facts("b", receive_only=True)]) == 100
    assert bound_s(JOB, SEED, [facts("a", receive_only=True), facts("b", receive_only=True)]) == 200


def test_an_owners_limit_overrides_the_measured_rate() -> None:
    measured, unknown = facts("a", 40 * MB), facts("b", None)
    limited = [replace(one, uplink_limit=2 * MB) for one in (measured, unknown)]
    assert [one.uplink for one in fill_in([SEED, *limited])] == [10 * MB, 2 * MB, 2 * MB]
    high = replace(unknown, uplink_limit=900 * MB)  # is no claim to so much
    assert [one.uplink for one in fill_in([SEED, measured, high])] == [10 * MB, 40 * MB, 40 * MB]


def test_the_prediction_is_the_busiest_link_and_the_longest_way() -> None:
    """Seed to a, a to b and c: a sends two copies; a frame takes 0.1 s, then twice 0.1 s, and 10 ms a hop."""
    a, b, c = (PeerId(name) for name in "abc")
    tree = Tree(SEED.peer, {a: SEED.peer, b: a, c: a})
    peers = [facts(name, latency_s=0.005) for name in ("seed", "a", "b", "c")]
    assert predicted_s(JOB, peers, (Stripe(1.0, tree),)) == pytest.approx(200 + 0.1 + 0.2 + 0.02)


def test_a_start_up_counts_for_the_share_of_the_frames_that_have_it() -> None:
    """Three quarters of the frames go from hop to hop, and one quarter straight to both peers."""
    a, b = PeerId("a"), PeerId("b")
    hops, star = (
        Tree(SEED.peer, {a: SEED.peer, b: a}),
        Tree(SEED.peer, {a: SEED.peer, b: SEED.peer}),
    )
    peers = [facts(name) for name in ("seed", "a", "b")]
    stripes = (Stripe(0.75, hops), Stripe(0.25, star), Stripe(0.0, star, spare=1.0))
    assert predicted_s(JOB, peers, stripes) == pytest.approx(125 + 0.75 * 0.2 + 0.25 * 0.2)


def test_a_plan_with_an_uplink_of_zero_never_ends() -> None:
    seed = facts("seed", 0.0)
    tree = Tree(SEED.peer, {PeerId("a"): SEED.peer})
    assert bound_s(JOB, seed, ABCD) == math.inf
    assert predicted_s(JOB, [seed, ABCD[0]], (Stripe(1.0, tree),)) == math.inf
