"""mu_min is where waiting ends, and a suggested change is enough and no larger than necessary."""

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from echo2d.core.capacity.model import Demand, bubble, judge, mu_min, slack_s

SECONDS = st.floats(0.0, 500.0)


@st.composite
def demands(draw: st.DrawFn) -> Demand:
    bound = draw(st.integers(0, 12))
    size = draw(st.sampled_from([1, 4, 8]))
    return Demand(
        draw(st.floats(1.0, 200.0)),
        size * draw(st.integers(1, 64)),
        bound,
        draw(st.integers(1, bound + 1)),
        draw(SECONDS),
        draw(st.sampled_from(["exclusive", "background"])),
        draw(st.floats(0.0, 20.0)),
        draw(st.floats(0.0, 50.0)),
        size,
        still_share=draw(st.floats(0.0, 1.0)),
        recompute_s=draw(st.floats(0.0, 20.0)),
    )


@given(demands(), st.floats(0.01, 0.99))
def test_the_learner_waits_below_mu_min_and_not_above(demand: Demand, share: float) -> None:
    needed = mu_min(demand)
    assume(needed is not None)
    assert needed is not None
    assert needed >= demand.trajectories_per_step / demand.t_train_s * (1 - 1e-9)
    assert abs(bubble(demand, needed * (1 + 1e-9))) < 1e-6
    assert 0 < bubble(demand, needed * share) < 1


@given(demands(), st.floats(0.0, 100.0))
def test_a_run_always_has_a_bubble_if_no_pool_is_enough(demand: Demand, mu_pool: float) -> None:
    if mu_min(demand) is None:
        assert bubble(demand, mu_pool) > 0


@given(demands(), st.floats(0.0, 100.0), st.floats(0.0, 100.0))
def test_more_workers_never_make_a_step_longer(demand: Demand, one: float, more: float) -> None:
    assert bubble(demand, one + more) <= bubble(demand, one) + 1e-12


@settings(max_examples=40)
@given(demands(), st.floats(0.0, 50.0))
def test_suggested_changes_are_enough_and_minimal(demand: Demand, available: float) -> None:
    verdict = judge(demand, available)
    assert verdict.feasible == (verdict.target is not None and verdict.target <= available)
    assert verdict.feasible == (verdict.why_not == "")
    for change in verdict.changes:
        assert judge(change.demand, available).feasible, change.text
        match change.text.split(" ")[0]:
            case "S":
                less = replace(change.demand, staleness_max=change.demand.staleness_max - 1)
                assert (
                    less.staleness_max == demand.staleness_max
                    or not judge(less, available).feasible
                )
            case "R":
                more = change.demand.trajectories_per_step + demand.group_size
                assert not judge(replace(demand, trajectories_per_step=more), available).feasible
            case "T_bcast":
                slower = replace(
                    demand, t_bcast_s=min(demand.t_bcast_s, change.demand.t_bcast_s * 1.02 + 1e-3)
                )
                assert not judge(slower, available).feasible


@given(demands(), st.floats(0.01, 3.0), st.floats(0.0, 1.0))
def test_a_broadcast_within_the_slack_costs_no_pool_anything(
    demand: Demand, times: float, share: float
) -> None:
    """Whatever the throughput, the learner waits no longer than with broadcasts that take no time."""
    spare_s = slack_s(demand)
    if demand.mode == "exclusive":
        assert spare_s == 0
        return
    mu_pool = times * demand.trajectories_per_step / demand.t_train_s
    slow, fast = replace(demand, t_bcast_s=share * spare_s), replace(demand, t_bcast_s=0.0)
    assume(spare_s > 0)
    assert bubble(slow, mu_pool) <= bubble(fast, mu_pool) + 1e-9
    assert mu_min(slow) == pytest.approx(mu_min(fast))
    slower = replace(demand, t_bcast_s=spare_s * 1.01 + 1e-3)
    needed, least = mu_min(slower), mu_min(fast)
    assert least is not None
    assert slower.skips or needed is None or needed > least
