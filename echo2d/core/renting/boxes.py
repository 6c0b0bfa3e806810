"""Tracks the rented boxes that may exist: a box counts until lists have shown that it is gone.

    row kept --start sent--> starting --a list shows it--> seen
                                |                            |
                                +---- marked for return: stop is sent until no list shows it ---> gone
                                                             gone --a list shows it--> seen

What a command reports about itself is not believed. A list that does not show a box is believed if

- it began when no command for that box could still be running, and
- a second list, begun settle_s later, does not show it either, and its worker does not serve, and
- the provider's lists are trustworthy. Lists that have never shown a started box are doubted until
  the box must have ended by itself, or the run closes; otherwise boxes would be started without end.
  For that the time counts that passed for certain: the rent clock may have jumped (`rent_time`).

A box with a label of this run that is unknown, or was believed gone, is marked for return at once.
It counts against the budget. Two ids under one label are two boxes. A box marked for return is
stopped when its worker holds nothing any more, or its time to finish is over. docs/design/renting.md
explains why. Not here: which boxes are useful (`autoscaler`), and what they cost (`budget`).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from echo2d.core.renting.budget import Label, Rental, RentOffer, Terms
from echo2d.core.renting.events import (
    Instance,
    Keep,
    List,
    RentAction,
    RentNote,
    RentRules,
    Retire,
    Start,
    Stop,
)

# A run starts at most this many boxes, because the rows of all of them are kept.
RENTALS_MAX = 20_000
# At most this many commands of one provider run at a time: each is a process, and most clouds limit
# calls.
COMMANDS_MAX = 8
# A command has certainly ended this long after its timeout.
KILL_S = 10.0
STOP_AGAIN_S_MAX = 120.0
# The time between two stops while no list can be believed.
BLIND_S = 600.0
# Events come more often than this. If the rent clock advances further between two of them, it has jumped, and no more
# than this has passed for certain.
EVENTS_APART_S = 300.0


@dataclass(slots=True)
class RentedBox:
    """A box that may exist; times are of the rent clock."""

    rental: Rental
    # A command for the box may run until this time; infinite: a command is running.
    busy_until: float
    # When the box's worker served last, or could first have served.
    served_at: float
    # The certain time (`RentedBoxes.advance`) at which the box has ended by itself, whatever the rent clock says.
    over_at: float
    ids: tuple[str, ...] = ()  # the provider's own
    absent_from: float | None = None  # when the first list without the box came
    serves: bool = False
    # Whether a list that began after the end of the box's last command shows the box.
    shown: bool = False
    # Why the box is marked for return; empty: it may stay.
    stop_reason: str = ""
    stops: int = 0
    stop_at: float = -math.inf
    seen_at: float = -math.inf  # when the box was last known to exist
    # Whether the box should exist: its start is not known to have failed, or its worker has served.
    made: bool = False
    # Whether the box was made but lists do not show it, so that the lists are doubted.
    doubted: bool = False
    # Whether the box's worker has leases or would get leases; it may finish them until stop_by.
    holds: bool = False
    stop_by: float = -math.inf

    def billed_to(self, now: float) -> float:
        """When billing ends: at `until` at the latest, unless the box was seen after `until`."""
        return now if self.seen_at > self.rental.until else min(now, self.rental.until)


@dataclass(slots=True)
class Side:
    """The state of one provider."""

    terms: Terms
    offers: tuple[RentOffer, ...]
    sighted: bool = False  # whether its last list could be read
    proven: bool = False  # whether a list has shown a box that was started
    listing: bool = False  # whether a list command runs
    list_at: float = -math.inf
    under_way: int = 0  # how many start and stop commands run
    reason: str = ""  # why the last list could not be read


class RentedBoxes:
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
        self.sides = {
            each.provider: Side(
                each, tuple(offer for offer in offers if offer.provider == each.provider)
            )
            for each in terms
        }
        kept = tuple(kept)
        for provider in {rental.provider for rental in kept if rental.seen} & self.sides.keys():
            self.sides[provider].proven = True
        self.boxes: dict[Label, RentedBox] = {}  # the boxes that may exist
        self.gone: dict[Label, Rental] = {}  # all others of the run
        self.gone_usd = 0.0
        self._number = 0
        # The seconds that have passed for certain since this object was made, and the rent clock then.
        self._certain_s, self._now = 0.0, now
        for rental in kept:
            self._number = max(self._number, rules.number_of(rental.label))
            if rental.gone_at is not None:
                self._has_gone(rental, rental.gone_at)
            else:
                side = self.sides.get(rental.provider)
                busy_s = 0.0 if side is None else side.terms.command_s + KILL_S
                self.boxes[rental.label] = RentedBox(
                    rental, rental.sent_at + busy_s, now, self._over_at(rental), made=True
                )

    def advance(self, now: float) -> None:
        """Call this before each event."""
        self._certain_s += min(max(0.0, now - self._now), EVENTS_APART_S)
        self._now = now

    def _over_at(self, rental: Rental) -> float:
        # While no process ran, the rent clock may have jumped: nothing is certain about a box of before.
        return self._certain_s + rental.until - rental.sent_at

    def _may_live(self, box: RentedBox, now: float) -> bool:
        """Whether a box that nothing has stopped may still exist."""
        return now < box.rental.until or self._certain_s < box.over_at

    # --- money

    def spent_usd(self, now: float) -> float:
        return self.gone_usd + sum(
            box.rental.cost_usd(box.billed_to(now)) for box in self.boxes.values()
        )

    def committed_usd(self, now: float) -> float:
        """The sum of what is spent and what is set aside."""
        return self.gone_usd + sum(
            box.rental.committed_usd(box.billed_to(now)) for box in self.boxes.values()
        )

    @property
    def usd_per_h(self) -> float:
        """The price of all boxes that may exist."""
        return sum(box.rental.rate for box in self.boxes.values())

    @property
    def horizon(self) -> float:
        """When all boxes that may exist have ended by themselves."""
        return max((box.rental.until for box in self.boxes.values()), default=-math.inf)

    # --- commands

    @property
    def full(self) -> bool:
        return len(self.gone) + len(self.boxes) >= RENTALS_MAX

    @property
    def next_number(self) -> int:
        return self._number + 1

    def doubts(self, provider: str) -> bool:
        """Whether the provider's lists miss a box that should exist."""
        return any(box.doubted for box in self.boxes.values() if box.rental.provider == provider)

    def start(self, offer: RentOffer, life_s: float, now: float, why: str = "") -> list[RentAction]:
        """Start a box, unless too many commands run."""
        side = self.sides[offer.provider]
        if side.under_way >= COMMANDS_MAX:
            return []
        self._number += 1
        label, terms = self._rules.label(offer, self._number), side.terms
        price, unit_s = offer.usd_per_h, terms.billed_by_s
        rental = Rental(
            label, offer.provider, offer.name, price, unit_s, now, life_s, terms.grace_s
        )
        self.boxes[label] = RentedBox(rental, now, now, self._over_at(rental))
        self._begin(self.boxes[label])
        return [Keep(rental), Start(rental, why)]

    def stops(self, now: float) -> list[RentAction]:
        """The stops that are due: a box marked for return is stopped again until it is gone."""
        stops: list[RentAction] = []
        for box in self.boxes.values():
            side = self.sides.get(box.rental.provider)
            if side is None or not box.stop_reason or now < max(box.stop_at, box.busy_until):
                continue
            if box.holds and now < box.stop_by:
                continue
            # Without a list that can be believed, a stop is repeated now and then.
            blind = box.absent_from is None or box.doubted
            due = not box.stops or box.shown or (blind and now >= box.busy_until + BLIND_S)
            if due and side.under_way < COMMANDS_MAX:
                self._begin(box)
                stops.append(Stop(box.rental, box.ids, box.stop_reason))
        return stops

    def _begin(self, box: RentedBox) -> None:
        box.busy_until, box.absent_from, box.shown = math.inf, None, False
        self.sides[box.rental.provider].under_way += 1

    def ended(self, label: Label, now: float) -> RentedBox:
        """Record that the command for this box has ended, and return the box."""
        box = self.boxes[label]
        assert box.busy_until == math.inf
        box.busy_until = now
        self.sides[box.rental.provider].under_way -= 1
        return box

    def stop_ended(self, label: Label, *, ok: bool, now: float) -> None:
        """A stop has ended. If lists still show the box after a while, it is stopped again.

        ok: the command succeeded, so lists get settle_s to notice.
        """
        box = self.ended(label, now)
        # The wait between two stops while lists still show the box. It doubles up to a limit,
        # because the box costs money.
        wait_s = min(STOP_AGAIN_S_MAX, 10.0 * 2 ** min(box.stops, 10))
        box.stops += 1
        box.stop_at = now + max(
            wait_s, self.sides[box.rental.provider].terms.settle_s if ok else 0.0
        )

    # --- lists

    def lists(self, now: float) -> list[RentAction]:
        """The lists that are due."""
        due = [side for side in self.sides.values() if not side.listing and now >= side.list_at]
        for side in due:
            side.listing = True
        return [List(side.terms.provider) for side in due]

    def listed(
        self, provider: str, began_at: float, instances: Sequence[Instance] | None, now: float
    ) -> list[RentAction]:
        """Handle the end of a list command, which began at `began_at`. instances: None if it failed."""
        side = self.sides[provider]
        side.listing, side.sighted = False, instances is not None
        side.list_at = now + side.terms.list_every_s
        if instances is None:
            return []
        # The ids of each label, as an ordered set.
        shown: dict[Label, dict[str, None]] = {}
        for each in instances:
            if each.label.startswith(self._rules.prefix):
                shown.setdefault(each.label, {})[each.id] = None
        actions = [
            action
            for label, ids in shown.items()
            for action in self._shown(side, label, tuple(ids), began_at, now)
        ]
        mine = [box for box in self.boxes.values() if box.rental.provider == provider]
        absent = [box for box in mine if box.rental.label not in shown]
        return [
            *actions,
            *(action for box in absent for action in self._not_shown(box, side, began_at, now)),
        ]

    def _shown(
        self, side: Side, label: Label, ids: tuple[str, ...], began_at: float, now: float
    ) -> list[RentAction]:
        actions = [] if label in self.boxes else self._unexpected(side, label, now)
        box = self.boxes[label]
        # The provider was renamed in the config: the box belongs to the provider that lists it.
        if box.rental.provider not in self.sides:
            box.rental = replace(box.rental, provider=side.terms.provider)
            actions.append(Keep(box.rental))
        # Two providers that share one account list each other's boxes, too.
        if box.rental.provider != side.terms.provider:
            return actions
        side.proven, box.doubted = True, False
        box.ids, box.absent_from, box.seen_at = ids, None, now
        if not box.rental.seen:
            box.rental = replace(box.rental, seen=True)
            actions.append(Keep(box.rental))
        box.shown = box.shown or began_at >= box.busy_until
        if len(ids) > box.rental.copies:
            box.rental = replace(box.rental, copies=len(ids))
            box.stop_reason = box.stop_reason or f"{len(ids)} boxes have its label"
            actions += [Keep(box.rental), RentNote("copies", f"{label}: {' '.join(ids)}")]
        return actions

    def _unexpected(self, side: Side, label: Label, now: float) -> list[RentAction]:
        """A list shows a box that is unknown or was believed gone: mark it for return, count its cost.

        An unknown box is assumed to have the provider's highest price.
        """
        self._number = max(self._number, self._rules.number_of(label))
        rental = self.gone.pop(label, None)
        if rental is None:
            usd_per_h, terms = (
                max((offer.usd_per_h for offer in side.offers), default=0.0),
                side.terms,
            )
            rental = Rental(
                label, terms.provider, "", usd_per_h, terms.billed_by_s, now, 0.0, terms.grace_s
            )
            why = "this run has not started it"
        else:
            self.gone_usd -= rental.cost_usd(now)
            rental, why = replace(rental, gone_at=None), "it was gone, and exists again"
        self.boxes[label] = RentedBox(rental, now, now, self._over_at(rental), stop_reason=why)
        return [Keep(rental), RentNote("unexpected", f"{label}: {why}")]

    def _not_shown(
        self, box: RentedBox, side: Side, began_at: float, now: float
    ) -> list[RentAction]:
        # The list may be older than the last command. It is wrong if the box's worker serves.
        if began_at < box.busy_until or box.serves:
            return []
        box.shown = False
        box.doubted = box.doubted and self._may_live(box, now)
        if box.absent_from is None:
            box.absent_from = now
        if began_at < box.absent_from + side.terms.settle_s:
            return []
        # If a box was made but never shown, the list may be wrong, and the box need not be gone.
        label, unproven = box.rental.label, box.made and not box.rental.seen
        doubtful = unproven and not side.proven and self._may_live(box, now)
        if doubtful and not self._rules.closing:
            known, box.doubted = box.doubted, True
            return (
                []
                if known
                else [RentNote("list_doubted", f"{label} was made, but lists do not show it")]
            )
        side.proven = side.proven and not unproven
        del self.boxes[label]
        gone = replace(box.rental, gone_at=box.billed_to(now))
        self._has_gone(gone, now)
        note = RentNote(
            "gone",
            f"{label}: it cost {gone.cost_usd(now):.2f} usd; "
            f"{box.stop_reason or 'this run has not stopped it'}",
        )
        return [Keep(gone), Retire(label), note]

    def _has_gone(self, rental: Rental, now: float) -> None:
        self.gone[rental.label] = rental
        self.gone_usd += rental.cost_usd(now)

    def check(self) -> None:
        """Check what holds between any two events."""
        assert not self.boxes.keys() & self.gone.keys()
        for label, box in self.boxes.items():
            assert box.rental.label == label
            assert box.rental.gone_at is None
            assert self._rules.number_of(label) <= self._number
            assert box.absent_from is None or box.busy_until <= box.absent_from
        for name, side in self.sides.items():
            under_way = [box for box in self.boxes.values() if box.busy_until == math.inf]
            assert (
                side.under_way
                == sum(box.rental.provider == name for box in under_way)
                <= COMMANDS_MAX
            )
        assert all(rental.gone_at is not None for rental in self.gone.values())
