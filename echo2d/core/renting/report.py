"""What renting has to say: numbers for `status` and /metrics, and sentences for a person. Decides nothing."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from echo2d.core.renting.boxes import RentedBox, RentedBoxes
from echo2d.core.renting.budget import Budget

STATES = ("starting", "seen", "serving", "leaving", "stopping")


def rent_facts(rented: RentedBoxes, budget: Budget, *, why: str, now: float) -> Mapping[str, Any]:
    """why: not more is started; empty: no more is needed. left_usd: of the total, neither spent nor set aside."""
    spent_usd, committed_usd = rented.spent_usd(now), rented.committed_usd(now)
    boxes = [_facts_of(box, now) for box in rented.boxes.values()]
    count = Counter(box["state"] for box in boxes)
    return {
        "usd_per_h": rented.usd_per_h,
        "usd_per_h_max": budget.usd_per_h,
        "spent_usd": spent_usd,
        "set_aside_usd": committed_usd - spent_usd,
        "committed_usd": committed_usd,
        "left_usd": max(0.0, budget.usd_total - committed_usd),
        "usd_total_max": budget.usd_total,
        "why": why,
        "blind": [name for name, side in rented.sides.items() if not side.sighted],
        "states": {state: count[state] for state in STATES},
        "boxes": boxes,
        "attention": list(_attention(rented, why)),
    }


def _attention(rented: RentedBoxes, why: str) -> Iterator[str]:
    if why:
        yield f"renting: more is needed, but {why}"
    for name, side in rented.sides.items():
        if not side.sighted and side.list_at > -math.inf:
            yield f"renting: what {name} has cannot be listed, so nothing is started there"
        if rented.doubts(name):
            yield f"renting: {name} does not list what was started there, so nothing more is: see its account"
    strangers = sorted({box.rental.provider for box in rented.boxes.values()} - rented.sides.keys())
    for name in strangers:
        yield f"renting: boxes of {name} may be there, which is no [[provider]]: nothing stops them"


def _facts_of(box: RentedBox, now: float) -> Mapping[str, Any]:
    rental = box.rental
    return {
        "label": rental.label, "provider": rental.provider, "offer": rental.offer, "ids": list(box.ids),
        "state": _state(box, now), "why": box.doomed, "usd_per_h": rental.rate, "age_s": now - rental.sent_at,
        "life_left_s": max(0.0, rental.sent_at + rental.life_s - now), "cost_usd": rental.cost_usd(box.billed_to(now)),
    }  # fmt: skip


def _state(box: RentedBox, now: float) -> str:
    if box.doomed:
        return "leaving" if box.holds and now < box.stop_by else "stopping"
    return "serving" if box.serves else "seen" if box.ids else "starting"
