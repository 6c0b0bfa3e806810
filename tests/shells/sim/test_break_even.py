"""When a data centre would be cheaper: the formula equals the forecast's own bill, and its zeros are right."""

from dataclasses import replace
from pathlib import Path

import pytest

from echo2d.plan.fleet.break_even import BreakEven, break_even
from echo2d.plan.fleet.forecast import provision
from echo2d.plan.fleet.spec import load_fleet
from echo2d.views.break_even import break_even_sentence, draw_map
from tests.support.paths import REPO

MIXES = ("rented", "spot", "metered")


def compared_of(mix: str) -> tuple[float, BreakEven]:
    """The saving as the difference of the two bills, and the comparison that has it by the formula."""
    fleet = load_fleet(REPO / f"scenarios/mix-{mix}.toml")
    found = provision(fleet)
    compared = break_even(fleet, found)
    assert compared is not None
    return 1.0 - found.usd_per_step / compared.centralized_usd, compared


@pytest.mark.parametrize("mix", MIXES)
def test_the_formula_equals_the_difference_of_the_two_bills(mix: str) -> None:
    saved, compared = compared_of(mix)
    assert compared.saving == pytest.approx(saved, abs=1e-9)
    assert 0.15 < saved < 0.35


@pytest.mark.parametrize("mix", MIXES)
def test_nothing_is_saved_at_the_break_even_point(mix: str) -> None:
    _, compared = compared_of(mix)
    share, ratio = compared.rollout_share, compared.price_ratio
    least = compared.rollout_share_min
    assert least is not None
    assert compared.saving_at(share, compared.price_ratio_max) == pytest.approx(0.0, abs=1e-12)
    assert compared.saving_at(least, ratio) == pytest.approx(0.0, abs=1e-12)
    assert compared.saving_at(share, 0.99 * compared.price_ratio_max) > 0
    assert compared.saving_at(0.99 * least, ratio) < 0


def test_a_run_whose_whole_cost_is_its_learner_saves_nothing() -> None:
    alone = BreakEven(0.0, 0.5, 1.1, 0.03, 10.0)
    assert alone.saving == pytest.approx(-0.03)
    assert alone.price_ratio_max == 0.0
    assert break_even_sentence(alone).endswith("no price would make this cheaper")
    dear = BreakEven(0.5, 1.2, 1.1, 0.03, 10.0)
    assert dear.rollout_share_min is None
    assert "more expensive" in break_even_sentence(dear)


def test_a_data_centre_without_overlap_is_named_if_the_file_has_one() -> None:
    _, rented = compared_of("rented")
    assert rented.synchronous_usd == pytest.approx(28.0 * 2244 / 3600)
    assert "(17.453 if it generates and trains by turns)" in break_even_sentence(rented)
    _, spot = compared_of("spot")
    assert spot.facts()["synchronous_usd_per_step"] is None
    assert "by turns" not in break_even_sentence(spot)


def test_no_comparison_is_made_without_a_data_centre() -> None:
    fleet = replace(load_fleet(REPO / "scenarios/mix-rented.toml"), centralized=None)
    assert break_even(fleet, provision(fleet)) is None


def test_the_map_of_break_even_points_is_drawn(tmp_path: Path) -> None:
    _, compared = compared_of("rented")
    draw_map(compared, tmp_path / "map.svg")
    drawn = (tmp_path / "map.svg").read_text()
    assert f"this run: {compared.saving:.0%}" in drawn
    assert "costs as much as a data centre" in drawn
