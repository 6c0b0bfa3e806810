"""What a status says of the need for boxes."""

from typing import Any

import pytest

from echo2d.core.capacity.demand import (
    NEED_MAX,
    Assumptions,
    Candidate,
    CapacityPlanner,
    CapacityRules,
)
from echo2d.core.capacity.measurements import Measurements
from echo2d.core.capacity.prices import Price
from echo2d.runtime.renting.demand import margin_of, shortfall_of


def facts(t_bcast_s: float) -> dict[str, Any]:
    """Of a run that takes 10 trajectories/s and has workers for 2."""
    known = CapacityPlanner(CapacityRules(100, 4, 1), Measurements(1), Assumptions(10.0, t_bcast_s))
    here = [Candidate("w", 2.0, Price())]
    shortfall = known.shortfall(here, 1)
    return {
        "provision": {**known.facts(known.offers(here, None), ["w"], 1), "shortfall": shortfall}
    }


def test_what_is_there_for_noise_is_what_gamma_adds() -> None:
    enough = facts(0.0)
    assert margin_of(enough) == pytest.approx(1.0)
    assert shortfall_of(enough) == pytest.approx(11.0 - 1.98)


def test_a_need_that_is_cut_off_is_no_smaller_than_what_is_there_for_noise() -> None:
    """Where almost nothing would be enough, something is rented all the same."""
    hopeless = facts(19.99)
    assert hopeless["provision"]["mu_min"] > 50 * 10.0
    assert shortfall_of(hopeless) == pytest.approx(NEED_MAX * 10.0 - 2.0)
    assert 0 < margin_of(hopeless) < 10.0


def test_nothing_is_there_for_noise_before_anything_is_known() -> None:
    assert margin_of({"provision": {"shortfall": None}}) == 0.0
