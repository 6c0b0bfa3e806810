"""Chooses which boxes to rent: the cheapest set that makes up the missing throughput
(`capacity/worker_cost`), within the usd/h that are free.

If that set costs too much, boxes are taken in the order of usd per trajectory, as long as they fit.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from echo2d.core.capacity.worker_cost import WorkerOffer, by_rho, choose
from echo2d.core.renting.budget import BUDGET_SLACK, HOUR_S, RentOffer


@dataclass(frozen=True, slots=True)
class Wanted:
    """The offers in the order in which to start them."""

    offers: tuple[RentOffer, ...]
    enough: bool  # whether they make up what is missing


def choose_boxes(
    missing_mu: float, free: Mapping[RentOffer, int], usd_per_h: float, *, gb_per_h: float = 0.0
) -> Wanted:
    """Choose boxes that make `missing_mu` trajectories/s.

    free: how many boxes of each offer may be started. usd_per_h: what they may cost together.
    gb_per_h: 10^9 bytes of versions that each box receives in an hour, and passes on once.
    """
    assert missing_mu > 0
    boxes = {
        f"{offer.provider}/{offer.name}#{number}": offer
        for offer, count in free.items()
        for number in range(_most(offer, count, missing_mu, usd_per_h))
    }
    can = [_as_offer(name, offer, gb_per_h) for name, offer in boxes.items()]
    choice = choose(can, missing_mu)
    ranked = [boxes[offer.name] for offer in by_rho(choice.offers)]
    if sum(offer.usd_per_h for offer in ranked) <= usd_per_h * (1 + BUDGET_SLACK):
        return Wanted(tuple(ranked), choice.enough)
    return Wanted(
        tuple(_that_fit([boxes[offer.name] for offer in by_rho(can)], usd_per_h)), enough=False
    )


def _as_offer(name: str, offer: RentOffer, gb_per_h: float) -> WorkerOffer:
    usd_per_h = offer.usd_per_h + gb_per_h * offer.usd_per_gb
    return WorkerOffer(name, offer.trajectories_per_h / HOUR_S, usd_per_h)


def _most(offer: RentOffer, count: int, missing_mu: float, usd_per_h: float) -> int:
    """The most boxes of one kind that are available, useful and affordable."""
    if offer.mu <= 0:
        return 0
    return max(
        0,
        math.ceil(
            min(count, missing_mu / offer.mu, usd_per_h * (1 + BUDGET_SLACK) // offer.usd_per_h)
        ),
    )


def _that_fit(ranked: Sequence[RentOffer], usd_per_h: float) -> list[RentOffer]:
    taken: list[RentOffer] = []
    for offer in ranked:
        if offer.usd_per_h <= usd_per_h * (1 + BUDGET_SLACK):
            taken.append(offer)
            usd_per_h -= offer.usd_per_h
    return taken
