import pytest

from echo2d.core.renting.budget import RentOffer
from echo2d.core.renting.selection import choose_boxes

SMALL = RentOffer("a", "small", 0.4, 360.0, 6)  # 0.1/s
LARGE = RentOffer("a", "large", 0.9, 1080.0, 3)  # 0.3/s: cheaper trajectories
METERED = RentOffer("b", "metered", 0.35, 360.0, 6, usd_per_gb=0.1)
NONE = RentOffer("b", "none", 0.1, 0.0, 6)


def names(
    missing: float, usd_per_h: float = 100.0, gb_per_h: float = 0.0, **free: int
) -> list[str]:
    offers = {offer: free.get(offer.name, 0) for offer in (SMALL, LARGE, METERED, NONE)}
    return [
        offer.name for offer in choose_boxes(missing, offers, usd_per_h, gb_per_h=gb_per_h).offers
    ]


def test_the_selection_is_the_cheapest_set_and_not_the_cheapest_trajectories() -> None:
    assert names(0.1, small=6, large=3) == ["small"]
    assert names(0.3, small=6, large=3) == ["large"]
    assert names(0.4, small=6, large=3) == ["large", "small"]


def test_the_selection_counts_the_price_of_traffic() -> None:
    assert names(0.1, small=1, metered=1) == ["metered"]
    assert names(0.1, gb_per_h=1.0, small=1, metered=1) == ["small"]


def test_an_offer_without_output_is_not_chosen() -> None:
    assert names(0.1, none=6) == []


@pytest.mark.parametrize(
    ("usd_per_h", "wanted"), [(0.3, []), (1.0, ["large"]), (1.3, ["large", "small"])]
)
def test_the_choice_of_boxes_is_limited_by_the_price(usd_per_h: float, wanted: list[str]) -> None:
    found = choose_boxes(2.0, {SMALL: 6, LARGE: 1}, usd_per_h)
    assert [offer.name for offer in found.offers] == wanted
    assert not found.enough


def test_an_infinite_shortfall_chooses_every_offer() -> None:
    assert names(float("inf"), small=2, large=1) == ["large", "small", "small"]
