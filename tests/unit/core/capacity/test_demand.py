"""From measurements to the workers that should be active."""

import pytest

from echo2d.core.base.ids import PeerId
from echo2d.core.capacity.demand import (
    Assumptions,
    Candidate,
    CapacityPlanner,
)
from echo2d.core.capacity.estimators import Estimate
from echo2d.core.capacity.measurements import Measurements
from echo2d.core.rules.prices import Price
from echo2d.core.rules.run import RunRules
from tests.support.coordinator_world import rules

# With T = 10 s, kappa = 1 and quick broadcasts 10 trajectories/s are needed.
RULES = rules(trajectories_per_step=100, staleness_max=4, group_size=1, group_patience=0.0)


SAID = Assumptions(10.0, 0.0)


def capacity_planner(said: Assumptions = SAID, chosen: RunRules = RULES) -> CapacityPlanner:
    return CapacityPlanner(chosen, Measurements(1), said)


def fleet(count: int, usd_per_h: float = 1.0, name: str = "w", **more: bool) -> list[Candidate]:
    return [
        Candidate(f"{name}{number}", 2.0, Price(usd_per_h=usd_per_h), **more)
        for number in range(count)
    ]


def test_no_worker_is_surplus_before_the_demand_is_known() -> None:
    unknown = capacity_planner(Assumptions())
    assert unknown.demand(1) is None
    assert len(unknown.review(fleet(9), 1, now=0.0).activate) == 9
    assert unknown.shortfall(fleet(9), 1) is None
    balance = unknown.balance(unknown.offers(fleet(9), None), {"w1"}, 1)
    assert (balance.mu_min, balance.feasible) == (None, None)
    assert balance.mu_pool == pytest.approx(1.98)


def test_the_demand_names_the_cheapest_pool_and_its_shortfall() -> None:
    known = capacity_planner()
    candidates = [*fleet(6, 2.0, "dear"), *fleet(6)]
    decision = known.review(candidates, 1, now=0.0)
    assert sorted(decision.activate) == [f"w{number}" for number in range(5)]
    assert known.pools is not None
    wanted = known.pools.best.mu
    assert wanted == pytest.approx(5 * 1.98)
    assert known.shortfall(fleet(3), 1) == pytest.approx(wanted - 3 * 1.98)
    assert known.shortfall(fleet(9), 1) == pytest.approx(wanted - 9 * 1.98)


def test_the_reason_names_the_price_of_a_step_and_those_of_neighbouring_pools() -> None:
    provision, workers = capacity_planner(Assumptions()), fleet(9)
    everybody = {each.name for each in workers}

    def shown() -> str:
        provision.review(workers, 1, now=0.0)
        return provision.balance(provision.offers(workers, None), everybody, 1).why

    assert shown() == "what the learner needs is not measured yet: all workers work"
    provision.said = SAID
    assert shown() == (
        "5 workers cost 0.04227 usd a step; 4 would cost 0.0491, 6 would cost 0.04444"
    )


def test_active_workers_count_as_available() -> None:
    known = capacity_planner()
    spot = fleet(6, 0.1)
    known.review(spot, 1, now=0.0)
    balance = known.balance(known.offers(spot, None), {each.name for each in spot}, 1)
    assert balance.mu_pool == balance.mu_available == pytest.approx(6 * 1.98)


def test_a_worker_with_a_notice_does_not_count() -> None:
    known = capacity_planner()
    known.review(fleet(6), 1, now=0.0)
    assert known.pools is not None
    assert known.shortfall([*fleet(3), *fleet(3, name="x", leaving=True)], 1) == pytest.approx(
        known.pools.best.mu - 3 * 1.98
    )


def test_claims_of_workers_raise_the_shortfall_at_most_to_five_times_the_learners_use() -> None:
    """Boxes are rented for it: one stolen worker's token must not be worth the whole budget an hour."""
    wasteful = capacity_planner()
    wasteful.measurements.yields.judged(
        [PeerId(each.name) for each in fleet(30)] * 1000, trained=False
    )
    free = [Candidate(f"w{number}", 2.0, Price(1e-6)) for number in range(30)]
    wasteful.review(free, 1, now=0.0)
    assert (wasteful.shortfall(free, 1) or 0.0) <= 50.0 - 30 * 2.0


def test_measurements_replace_assumptions_and_dropped_work_does_not_count() -> None:
    known = capacity_planner()
    for _ in range(4):
        known.measurements.t_train.add(20.0)
    (worker,) = fleet(1)
    for trained in (True, False) * 500:
        known.measurements.yields.judged([PeerId(worker.name)], trained=trained)
    demand = known.demand(1)
    assert demand is not None
    assert demand.t_train_s == 20.0
    assert known.offers([worker], None)[0].mu == pytest.approx(1.0, rel=0.05)


def test_workers_that_stop_for_a_version_lose_the_measured_time() -> None:
    stopping = capacity_planner(Assumptions(10.0, 4.0), rules(RULES, mode="exclusive"))
    before = stopping.demand(1)
    measurements = stopping.measurements
    for _ in range(4):
        measurements.holds("w", 4, 4, now=0.0)  # type: ignore[arg-type]
        measurements.stood_still("w", 1.0, now=9.0)  # type: ignore[arg-type]
        measurements.version_served(["w"])  # type: ignore[list-item]
    after = stopping.demand(1)
    assert before is not None
    assert after is not None
    assert (before.lost_s, after.lost_s, after.t_bcast_s) == (4.0, 1.0, 4.0)
    assert measurements.still.estimate == Estimate(1.0, 0.0, 4)


def test_the_order_of_free_workers_depends_neither_on_prices_nor_on_others() -> None:
    known = capacity_planner(chosen=rules(RULES, by_cost=False))
    candidates = [*fleet(20, 2.0, "dear"), *fleet(20)]
    names = [offer.name for offer in known.offers(candidates, None)]
    assert [offer.name for offer in known.offers(candidates[10:30], None)] == [
        name for name in names if name in {each.name for each in candidates[10:30]}
    ]
    assert {name[:4] == "dear" for name in names[:8]} == {True, False}


def test_bandwidth_is_priced_by_the_size_of_the_spreading_form() -> None:
    known = capacity_planner()
    known.measurements.wire_bytes.add(1e9)
    metered = Candidate("m", 2.0, Price(usd_per_gb_down=0.01, usd_per_gb_up=0.02), copies_sent=2.0)
    assert known.offers([metered], 3600.0)[0].usd_per_h == pytest.approx(0.05)
