"""The status of renting: numbers for `GET /v1/status` and /metrics, and sentences for a person.

It reads the boxes and the budget, and decides nothing.
"""

import math
from collections import Counter
from collections.abc import Iterator

from echo2d.core.renting.boxes import RentedBox, RentedBoxes
from echo2d.core.renting.budget import Budget
from echo2d.core.status.schema import Alert, BoxStatus, RentingStatus

STATES = ("starting", "seen", "serving", "leaving", "stopping")


def renting_status(rented: RentedBoxes, budget: Budget, *, why: str, now: float) -> RentingStatus:
    """Make the status. why: the reason why no more boxes are started; empty: no more are needed."""
    spent_usd, committed_usd = rented.spent_usd(now), rented.committed_usd(now)
    boxes = tuple(_box(box, now) for box in rented.boxes.values())
    count = Counter(box.state for box in boxes)
    return RentingStatus(
        usd_per_h=rented.usd_per_h,
        usd_per_h_max=budget.usd_per_h,
        spent_usd=spent_usd,
        set_aside_usd=committed_usd - spent_usd,
        committed_usd=committed_usd,
        left_usd=max(0.0, budget.usd_total - committed_usd),
        usd_total_max=budget.usd_total,
        why=why,
        blind=tuple(name for name, side in rented.sides.items() if not side.sighted),
        states={state: count[state] for state in STATES},
        boxes=boxes,
        alerts=tuple(_alerts(rented, why)),
    )


def _alerts(rented: RentedBoxes, why: str) -> Iterator[Alert]:
    if why:
        yield Alert("renting_short", f"renting: more is needed, but {why}")
    for name, side in rented.sides.items():
        if not side.sighted and side.list_at > -math.inf:
            yield Alert(
                "renting_blind",
                f"renting: the boxes of {name} cannot be listed, so nothing is started there: {side.reason}",
            )
        if rented.doubts(name):
            yield Alert(
                "renting_doubts",
                f"renting: {name} does not list a box that was started there, "
                "so no more are started: see its account",
            )
    strangers = sorted({box.rental.provider for box in rented.boxes.values()} - rented.sides.keys())
    for name in strangers:
        yield Alert(
            "renting_stranger",
            f"renting: boxes of {name} may exist, but it is no [[provider]] any more: nothing stops them",
        )


def _box(box: RentedBox, now: float) -> BoxStatus:
    rental = box.rental
    return BoxStatus(
        label=rental.label,
        provider=rental.provider,
        offer=rental.offer,
        ids=tuple(box.ids),
        state=_state(box, now),
        why=box.stop_reason,
        usd_per_h=rental.rate,
        age_s=now - rental.sent_at,
        life_left_s=max(0.0, rental.sent_at + rental.life_s - now),
        cost_usd=rental.cost_usd(box.billed_to(now)),
    )


def _state(box: RentedBox, now: float) -> str:
    if box.stop_reason:
        return "leaving" if box.holds and now < box.stop_by else "stopping"
    return "serving" if box.serves else "seen" if box.ids else "starting"
