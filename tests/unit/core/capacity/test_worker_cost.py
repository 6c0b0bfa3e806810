"""The cheapest workers that make enough: the worked example, the edges."""

import random
import time

import pytest

from echo2d.core.capacity.worker_cost import EXACT_MAX, WorkerOffer, bandwidth_usd_per_h, choose

A, B, C = (
    WorkerOffer("a", 6 / 3600, 3.0),
    WorkerOffer("b", 6 / 3600, 3.1),
    WorkerOffer("c", 5 / 3600, 2.6),
)


def test_the_choice_of_workers_equals_the_worked_example() -> None:
    best = choose([A, B, C], 10 / 3600)
    assert [offer.name for offer in best.offers] == ["a", "c"]
    assert best.usd_per_h == pytest.approx(5.6)
    assert best.bound_usd_per_h == pytest.approx(3 + 4 / 6 * 3.1)
    assert (best.enough, best.exact) == (True, True)
    assert A.rho == pytest.approx(0.5)


def test_bandwidth_decides_if_it_is_metered() -> None:
    """16 GB in full at 0.02 usd/GB, 12 times an hour, costs more than the GPU; a delta of 3 % does not."""
    common = {
        "publishes_per_h": 12.0,
        "copies_sent": 0.0,
        "usd_per_gb_down": 0.02,
        "usd_per_gb_up": 0.05,
    }
    assert bandwidth_usd_per_h(wire_bytes=16e9, **common) == pytest.approx(3.84)
    assert bandwidth_usd_per_h(wire_bytes=0.03 * 16e9, **common) == pytest.approx(0.1152)
    assert bandwidth_usd_per_h(wire_bytes=16e9, **{**common, "copies_sent": 1.0}) == pytest.approx(
        13.44
    )


def test_all_workers_are_chosen_if_all_are_too_few() -> None:
    best = choose([A, B], 100.0)
    assert (len(best.offers), best.enough) == (2, False)


def test_no_worker_is_chosen_if_nothing_is_wanted_and_never_one_without_output() -> None:
    assert choose([A], 0.0).offers == ()
    idle = WorkerOffer("idle", 0.0, 0.0)
    assert idle.rho == float("inf")
    assert choose([idle, A], 1.0).offers == (A,)


def test_rates_of_a_third_add_up() -> None:
    thirds = [WorkerOffer(str(index), 1 / 3, 1.0) for index in range(4)]
    assert len(choose(thirds, 1.0).offers) == 3


@pytest.mark.parametrize("kind", ["random", "same rho", "alike"])
def test_the_worst_cases_take_less_than_a_second(kind: str) -> None:
    """Sets that all cost the same per trajectory are hard to tell apart: then nearly exact has to do."""
    chance = random.Random(7)
    offers = []
    for index in range(EXACT_MAX):
        mu = 1.0 if kind == "alike" else chance.uniform(0.5, 2.0)
        offers.append(
            WorkerOffer(str(index), mu, mu if kind == "same rho" else chance.uniform(0.5, 2.0))
        )
    began = time.process_time()
    best = choose(offers, 20.0)
    assert time.process_time() - began < 5.0
    assert best.enough
    assert best.bound_usd_per_h <= best.usd_per_h <= 1.05 * best.bound_usd_per_h
