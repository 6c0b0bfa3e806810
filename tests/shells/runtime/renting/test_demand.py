"""What a status says of the need for boxes."""

from dataclasses import replace

import pytest

from echo2d.core.capacity.demand import (
    NEED_MAX,
    Assumptions,
    Candidate,
    CapacityPlanner,
)
from echo2d.core.capacity.measurements import Measurements
from echo2d.core.rules.prices import Price
from echo2d.core.status.schema import ProvisionStatus, VersionBytes
from echo2d.runtime.renting.demand import gb_per_h, margin_of
from tests.support.coordinator_world import World, rules

NOTHING_KNOWN = World().state.status()


def provision(t_bcast_s: float) -> ProvisionStatus:
    """Of a run that takes 10 trajectories/s and has workers for 2."""
    known = CapacityPlanner(
        rules(trajectories_per_step=100, staleness_max=4, group_size=1),
        Measurements(1),
        Assumptions(10.0, t_bcast_s),
    )
    here = [Candidate("w", 2.0, Price(1.0))]
    known.price(here, 1)
    balance = known.balance(known.offers(here, None), ["w"], 1)
    return replace(
        NOTHING_KNOWN.provision,
        mu_min=balance.mu_min,
        mu_available=balance.mu_available,
        shortfall=known.shortfall(here, 1),
    )


def test_what_is_there_for_noise_is_what_gamma_adds() -> None:
    enough = provision(0.0)
    assert enough.shortfall is not None
    target = enough.shortfall + 1.98
    assert 9.0 < target < 12.0
    assert margin_of(enough) == pytest.approx(target / 11.0)


def test_a_need_that_hardly_anything_meets_is_no_smaller_than_what_is_there_for_noise() -> None:
    """Where almost nothing would be enough, something is rented all the same."""
    hopeless = provision(19.99)
    assert (hopeless.mu_min or 0.0) > 50 * 10.0
    assert 0 < margin_of(hopeless) < (hopeless.shortfall or 0.0) <= NEED_MAX * 10.0


def test_nothing_is_there_for_noise_before_anything_is_known() -> None:
    assert margin_of(NOTHING_KNOWN.provision) == 0.0


def test_versions_cost_their_median_size_once_a_publish_period() -> None:
    assert gb_per_h(NOTHING_KNOWN) == 0.0
    sizes = {0: VersionBytes(9 * 10**9, 9 * 10**9), 1: VersionBytes(10**9, 9 * 10**9)}
    sizes[2] = sizes[1]
    known = replace(NOTHING_KNOWN, version_bytes=sizes, t_train_s=(30.0,) * 3, publish_every=2)
    assert gb_per_h(known) == pytest.approx(60.0)
