"""Decides when boxes are rented and given back, within the budget.

    shortfall --lasts patience_s, the budget has room--> start the cheapest boxes that make it up
    box       --of no use, or over the budget--> marked for return: its worker gets no new leases
                (`leaving`), finishes what it holds within drain_s, and is stopped until it is gone
                (`boxes`)

A box whose start command failed is also marked for return, because it may exist. Nothing is started
at a provider before this process has read the provider's list, nor while the last list failed or
lacks a box that should exist. Boxes that are starting count as if they worked already. If a kind of
box fails to start or never serves, no more boxes of this kind are started for a while; this while
doubles with each failure. A box is drained before its life ends, so that it is stopped in time.

Invariant: the budget is never exceeded, whatever happens to this process, because each start sets
aside what the box costs until the box ends by itself (`budget.life_s`). `now` is the run's rent
clock (`budget`). Every command ends in an event. docs/guide/renting.md explains the rules.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import assert_never

from echo2d.core.renting.boxes import RentedBox, RentedBoxes
from echo2d.core.renting.budget import BUDGET_SLACK, HOUR_S, Label, Rental, RentOffer, Terms, life_s
from echo2d.core.renting.events import (
    Listed,
    NeedMeasured,
    RentAction,
    RentEvent,
    RentNote,
    RentRules,
    StartEnded,
    StopEnded,
)
from echo2d.core.renting.report import renting_status
from echo2d.core.renting.selection import choose_boxes
from echo2d.core.status.schema import RentingStatus

# At most this share of a box's life is spent on finishing what its worker holds.
DRAIN_SHARE_MAX = 0.25


@dataclass(slots=True)
class _Trouble:
    """The failures of one kind of box."""

    times: int = 0
    # The reason of the last failure, in the provider's own words; empty: it gave none.
    reason: str = ""
    until: float = -math.inf  # no box of this kind is started before


class Autoscaler:
    """See the module docstring."""

    def __init__(
        self,
        rules: RentRules,
        terms: Sequence[Terms],
        offers: Sequence[RentOffer],
        kept: Iterable[Rental],
        *,
        now: float,
    ) -> None:
        self._rules = rules
        self._rented = RentedBoxes(rules, terms, offers, kept, now=now)
        self._offers = {(offer.provider, offer.name): offer for offer in offers}
        self._trouble: dict[RentOffer, _Trouble] = {}
        self._need = NeedMeasured(None, wanted=False, workers=0)
        self._watched_at = now
        self._short_since: float | None = None
        # Why no more boxes are started; empty: no more are needed.
        self._why = ""

    # --- for others to read

    @property
    def live(self) -> Mapping[Label, Rental]:
        """The boxes that may exist."""
        return {label: box.rental for label, box in self._rented.boxes.items()}

    @property
    def over(self) -> bool:
        """Whether nothing is rented, and the list of every provider was read."""
        return not self._rented.boxes and all(side.sighted for side in self._rented.sides.values())

    @property
    def leaving(self) -> Mapping[Label, str]:
        """The boxes marked for return, with reasons: their workers must get no new leases."""
        return {
            label: box.stop_reason for label, box in self._rented.boxes.items() if box.stop_reason
        }

    @property
    def horizon(self) -> float:
        """When all boxes that may exist have ended by themselves."""
        return self._rented.horizon

    def status(self, *, now: float) -> RentingStatus:
        return renting_status(self._rented, self._rules.budget, why=self._why, now=now)

    # --- events

    def handle(self, event: RentEvent, *, now: float) -> list[RentAction]:
        self._rented.advance(now)
        match event:
            case NeedMeasured():
                self._need_measured(event, now)
                actions: list[RentAction] = []
            case StartEnded(label, ok, reason):
                actions = self._start_ended(label, reason, ok=ok, now=now)
            case StopEnded(label, ok):
                self._rented.stop_ended(label, ok=ok, now=now)
                actions = []
            case Listed(provider, began_at, instances, reason):
                actions = self._rented.listed(provider, began_at, instances, now)
                self._rented.sides[provider].reason = reason
            case _:
                assert_never(event)
        returned = [*self._return_useless(now), *self._return_expensive(now)]
        return [
            *actions,
            *returned,
            *self._rented.stops(now),
            *self._rented.lists(now),
            *self._starts(now),
        ]

    def _need_measured(self, need: NeedMeasured, now: float) -> None:
        gap = now - self._watched_at
        self._need, self._watched_at = need, now
        for label, box in self._rented.boxes.items():
            box.serves, box.holds = label in need.serving, label in need.holding
            if box.serves:
                if _never_served(box):
                    self._trouble.pop(self._kind(box), None)
                box.served_at, box.seen_at, box.made = now, now, True
            # A gap of more than a minute between two needs means that this process stood still. No
            # worker is blamed for the gap.
            elif gap > 60.0:
                box.served_at += gap

    def _start_ended(self, label: Label, reason: str, *, ok: bool, now: float) -> list[RentAction]:
        box = self._rented.ended(label, now)
        box.made = box.made or ok
        if ok:
            return []
        box.stop_reason = box.stop_reason or "its start command failed"
        return [self._failed(box, now, reason)]

    def _failed(self, box: RentedBox, now: float, reason: str = "") -> RentNote:
        """Record a failure: no more boxes of this kind are started for a while."""
        trouble = self._trouble.setdefault(self._kind(box), _Trouble())
        # The pause doubles with each failure, up to an hour.
        trouble.until = now + min(3600.0, 60.0 * 2 ** min(trouble.times, 10))
        trouble.times += 1
        trouble.reason = reason or box.stop_reason
        kind = f"{box.rental.provider}/{box.rental.offer}"
        text = (
            f"{box.rental.label}: {box.stop_reason}; no more {kind} for {trouble.until - now:.0f} s"
        )
        return RentNote("failed", text)

    # --- which boxes are given back

    def _return_useless(self, now: float) -> list[RentAction]:
        notes: list[RentAction] = []
        need = self._need
        spare_mu = -math.inf if need.shortfall_mu is None else need.margin_mu - need.shortfall_mu
        spare_mu -= sum(
            self._mu(box) for box in self._rented.boxes.values() if box.stop_reason and box.serves
        )
        for box in self._rented.boxes.values():
            if box.stop_reason or not (
                why := self._why_not(box, now, spare=spare_mu >= self._mu(box))
            ):
                continue
            spare_mu -= self._mu(box) if box.serves else 0.0
            note = self._mark(box, why, now)
            failed = _never_served(box) and now >= box.served_at + self._rules.join_s
            notes.append(self._failed(box, now) if failed else note)
        return notes

    def _mark(self, box: RentedBox, why: str, now: float) -> RentNote:
        """Mark the box for return: it is stopped once its worker has finished, within drain_s and its life."""
        box.stop_reason = why
        box.stop_by = min(now + self._rules.drain_s, box.rental.sent_at + box.rental.life_s)
        more = (
            f"; it has {box.stop_by - now:.0f} s to finish"
            if box.holds and box.stop_by > now
            else ""
        )
        return RentNote("returning", f"{box.rental.label}: {why}{more}")

    def _why_not(self, box: RentedBox, now: float, *, spare: bool) -> str:
        """Why to give the box back; empty: the box may stay. spare: whether the other boxes are enough
        without this box.
        """
        rules, need, rental = self._rules, self._need, box.rental
        if rules.closing:
            return "the run gives everything back"
        if now >= rental.sent_at + rental.life_s - min(
            rules.drain_s, DRAIN_SHARE_MAX * rental.life_s
        ):
            return "its time ends"
        if now >= box.served_at + rules.join_s:
            return f"its worker has not served for {now - box.served_at:.0f} s"
        idle_s = need.serving.get(rental.label, 0.0)
        if idle_s >= rules.idle_s and (spare or not need.wanted):
            return f"it had no work for {idle_s:.0f} s"
        return ""

    def _return_expensive(self, now: float) -> list[RentAction]:
        """If running boxes exceed the budget, mark the most expensive ones for return.

        They exceed it if it was lowered, or if a provider made boxes that were not ordered. Boxes that
        are marked already count first.
        """
        budget, notes = self._rules.budget, list[RentAction]()
        over_usd = self._rented.committed_usd(now) - budget.usd_total * (1 + BUDGET_SLACK)
        over_rate = self._rented.usd_per_h - budget.usd_per_h * (1 + BUDGET_SLACK)
        candidates = sorted(
            self._rented.boxes.values(), key=lambda box: (not box.stop_reason, -self._rho(box))
        )
        for box in candidates:
            if over_usd <= 0 and over_rate <= 0:
                break
            over_rate -= box.rental.rate
            over_usd -= box.rental.committed_usd(now) - box.rental.cost_usd(now)
            if not box.stop_reason:
                notes.append(self._mark(box, "it exceeds the budget", now))
        return notes

    def _rho(self, box: RentedBox) -> float:
        """A number proportional to the box's usd per trajectory."""
        mu = self._kind(box).mu
        return box.rental.usd_per_h / mu if mu > 0 else math.inf

    # --- which boxes are started

    def _starts(self, now: float) -> list[RentAction]:
        missing, self._why = self._missing_mu(), ""
        if missing <= self._need.margin_mu:
            self._short_since = None
            return []
        if self._short_since is None:
            self._short_since = now
        if now < self._short_since + self._rules.patience_s:
            return []
        room = self._rules.budget.usd_per_h - self._rented.usd_per_h
        wanted = choose_boxes(missing, self._free(now), room, gb_per_h=self._need.gb_per_h)
        if not wanted.enough:
            self._why = "the usd/h left, or the offered boxes, are not enough" + self._failures(now)
        why = "nothing can be measured without a worker"
        if self._need.shortfall_mu is not None:
            why = f"{missing * HOUR_S:.4g} trajectories/h are missing"
        return [action for offer in wanted.offers for action in self._start(offer, why, now)]

    def _failures(self, now: float) -> str:
        """Which offers are not started at present because they failed, in the providers' own words."""
        return "".join(
            f"; {offer.provider}/{offer.name} failed {trouble.times} times, at last: {trouble.reason}"
            for offer, trouble in self._trouble.items()
            if now < trouble.until
        )

    def _missing_mu(self) -> float:
        """The part of the shortfall that the starting boxes will not make up, in trajectories/s."""
        need = self._need
        coming = [
            box for box in self._rented.boxes.values() if not box.stop_reason and not box.serves
        ]
        if self._rules.closing or not need.wanted:
            return 0.0
        # Without a worker nothing can be measured, so one box is started to measure with.
        if need.shortfall_mu is None:
            # Every box makes more trajectories/s than this, so one box is enough.
            return 1e-12 if not coming and not need.workers else 0.0
        return need.shortfall_mu - sum(self._kind(box).mu for box in coming)

    def _free(self, now: float) -> dict[RentOffer, int]:
        """How many boxes of each offer may be started."""
        there = [self._kind(box) for box in self._rented.boxes.values()]
        return {
            offer: offer.count_max - there.count(offer)
            for offer in self._offers.values()
            if self._may_start(offer.provider) and now >= self._trouble.get(offer, _Trouble()).until
        }

    def _may_start(self, provider: str) -> bool:
        """Whether the provider's lists can be believed."""
        return self._rented.sides[provider].sighted and not self._rented.doubts(provider)

    def _start(self, offer: RentOffer, why: str, now: float) -> list[RentAction]:
        rented, rules = self._rented, self._rules
        life = life_s(
            rented.next_number,
            offer,
            rented.sides[offer.provider].terms,
            rules.budget,
            committed_usd=rented.committed_usd(now),
            usd_per_h=rented.usd_per_h,
            longest_s=rules.life_s,
        )
        if life is None or rented.full:
            self._why = "the rest of the budget does not pay for a box"
            return []
        return rented.start(offer, life, now, why)

    # --- inside

    def _mu(self, box: RentedBox) -> float:
        """The box's trajectories/s: measured, or until then those of the offer."""
        return self._need.mu.get(box.rental.label, self._kind(box).mu)

    def _kind(self, box: RentedBox) -> RentOffer:
        rental = box.rental
        unknown = RentOffer(
            rental.provider, rental.offer, rental.usd_per_h, trajectories_per_h=0.0, count_max=0
        )
        return self._offers.get((rental.provider, rental.offer), unknown)

    def check(self) -> None:
        self._rented.check()
        assert all(trouble.times > 0 for trouble in self._trouble.values())


def _never_served(box: RentedBox) -> bool:
    return box.served_at <= box.rental.sent_at
