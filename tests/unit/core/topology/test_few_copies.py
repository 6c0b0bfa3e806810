"""The smallest number of the seed's copies that is fast enough, and when trees with that number stay."""

from dataclasses import replace

import pytest

from echo2d.core.base.ids import PeerId, PlanId
from echo2d.core.topology.few_copies import is_worth_keeping, plan_within, seed_copies
from echo2d.core.topology.plan import Plan
from echo2d.core.topology.planner import plan_again, plan_at_most, plan_auto
from echo2d.core.topology.repair import join, repair
from tests.support.plans import JOB, MB, ONE, facts

# It could feed all eight at once.
SEED = facts("seed", 100 * MB, 200 * MB)
SLOW = [facts(name, 5 * MB, 200 * MB) for name in "abcdefgh"]
FASTEST = plan_auto(ONE, JOB, SEED, SLOW)


def within(seconds: float) -> Plan:
    plan = plan_within(ONE, JOB, SEED, SLOW, seconds)
    plan.check()
    return plan


def test_one_copy_is_sent_if_there_is_time_for_it() -> None:
    plan = within(1000.0)
    assert seed_copies(plan) == pytest.approx(1.0)
    assert FASTEST.predicted_s < plan.predicted_s < 1000
    assert seed_copies(FASTEST) > 5


def test_a_shorter_time_takes_more_copies_up_to_those_of_the_fastest_plan() -> None:
    most = seed_copies(FASTEST)
    sent = [seed_copies(within(times * FASTEST.predicted_s)) for times in (2.5, 1.5, 1.2, 1.0)]
    assert sent == sorted(sent)
    assert 1 < sent[0] < sent[-1] <= most
    assert within(0.9 * FASTEST.predicted_s) == FASTEST


def test_a_large_swarm_feeds_few_peers_below_the_seed() -> None:
    peers = [facts(f"p{number}", 40 * MB, 80 * MB) for number in range(60)]
    seed = facts("seed", 1250 * MB, 1250 * MB)
    fastest = plan_auto(ONE, JOB, seed, peers)
    few = plan_within(ONE, JOB, seed, peers, 2 * fastest.predicted_s)
    few.check()
    assert seed_copies(fastest) > 10
    assert seed_copies(few) == pytest.approx(1.0)


def test_peers_that_cannot_be_dialled_go_below_those_that_can() -> None:
    peers = [facts(f"p{number}", 5 * MB, 200 * MB, open_=number < 3) for number in range(16)]
    assert seed_copies(plan_auto(ONE, JOB, SEED, peers)) > 10
    few = plan_within(ONE, JOB, SEED, peers, 10_000.0)
    few.check()
    assert seed_copies(few) == pytest.approx(1.0)


def test_each_peer_that_passes_nothing_on_gets_its_own_copy() -> None:
    silent = [facts(name, receive_only=True) for name in "abc"]
    assert plan_at_most(ONE, JOB, SEED, silent, 2.75) is None
    assert seed_copies(plan_within(ONE, JOB, SEED, silent, 10_000.0)) == 3


def test_a_newcomer_and_a_repair_cost_the_seed_nothing_more() -> None:
    """Not even where one peer was alone below the seed, which is a star otherwise."""
    alone = plan_within(ONE, JOB, SEED, SLOW[:1], 1000.0)
    assert alone.shape == "relay"
    assert seed_copies(join(alone, SLOW[1])) == 1
    plan = within(1000.0)
    plan = join(plan, facts("new"))
    for lost in "abnew"[:2]:
        plan = repair(plan, PeerId(lost))
        plan.check()
    assert seed_copies(repair(plan, PeerId("new"))) == pytest.approx(1.0)


def test_trees_with_as_few_copies_stay_if_they_are_fast_enough() -> None:
    few, again = within(1000.0), PlanId(2)
    kept = plan_again(few, again, JOB, SEED, SLOW)
    assert kept is not None
    assert is_worth_keeping(kept, within(1000.0), 1000.0)
    assert not is_worth_keeping(kept, within(100.0), 100.0), "they have become too slow"
    assert not is_worth_keeping(FASTEST, few, 1000.0), "one copy would do"
    assert is_worth_keeping(FASTEST, FASTEST, 1.0), "nothing is fast enough"
    assert not is_worth_keeping(replace(FASTEST, peers=FASTEST.peers[:-1]), FASTEST, 1.0)


def test_trees_without_spare_time_stay_only_if_the_seed_may_send_as_many_copies() -> None:
    """As far as is known both take as long, but a relay may be slower than is known."""
    peers = [facts(name, 200 * MB, 200 * MB) for name in "abcd"]
    few = plan_at_most(ONE, JOB, SEED, peers, 1.0)
    fastest = plan_auto(ONE, JOB, SEED, peers)
    assert few is not None
    assert few.predicted_s == pytest.approx(fastest.predicted_s)
    assert not is_worth_keeping(few, fastest, 0.0)
    assert is_worth_keeping(few, fastest, 1000.0)


@pytest.mark.parametrize("copies_max", [1.0, 1.5, 4.0, 7.9])
def test_the_directly_sent_share_is_limited_by_the_number_of_copies(copies_max: float) -> None:
    """A frame for everybody costs as many copies as there are peers, and a relayed one costs one."""
    plan = plan_at_most(ONE, JOB, SEED, SLOW, copies_max)
    assert plan is not None
    spares = [stripe.spare for stripe in plan.stripes if stripe.spare]
    assert spares == ([] if copies_max == 1 else [pytest.approx((copies_max - 1) / 7)])
    assert seed_copies(plan) <= copies_max * (1 + 1e-9)


def test_a_seed_that_may_send_a_copy_to_every_peer_has_no_limit() -> None:
    plan = plan_at_most(ONE, JOB, SEED, SLOW, 8.0)
    assert plan is not None
    assert plan.stripes == FASTEST.stripes


def test_spare_stripes_of_peers_behind_nat_keep_the_bound_together() -> None:
    """The seed may fill each of them, so they divide what is allowed."""
    peers = [facts(f"p{number}", 5 * MB, open_=number < 3) for number in range(9)]
    plan = plan_at_most(ONE, JOB, SEED, peers, 2.0)
    assert plan is not None
    spares = [stripe.spare for stripe in plan.stripes if stripe.spare]
    assert len(spares) == 1 + 6
    assert sum(spares) == pytest.approx(1 / 8)
