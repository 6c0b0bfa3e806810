"""Computes what each rented box has cost and may still cost, and how long the next one may live.

    label      the box's name, at its provider as well; never used twice
    sent_at    when its start command was sent; it is paid for from then on, even if the start failed
    life_s     the coordinator stops the box this long after `sent_at`; the box must end by itself
               this long after it began
    grace_s    how long its start and its end may take in addition
    until      sent_at + life_s + grace_s: it has ended by then, even without a coordinator
    gone_at    when a list showed that it is gone

Times are seconds of the run's rent clock, which only grows (`rent_time`). A box costs its price
from `sent_at` to `gone_at`, and a started unit of `billed_by_s` counts in full. While it may exist,
its whole price to `until` is set aside. Invariant: when a box is started, `committed_usd` (spent
and set aside) stays below the budget's total, and nothing later makes it grow, unless a box
outlives `until`.

Of the money that is left, a new box gets the share that its price has of the free usd/h. So the money lasts equally
long for all boxes that may still be started. Example: 10 usd in all, 2 usd/h, boxes of 0.5 usd/h. The first one gets
0.5/2 of 10 usd = 2.5 usd, which is 5 h; the next three get the same (0.5/1.5 of 7.5 usd, ...), and then all money is
set aside. Each life is shortened by up to LIFE_SPREAD, so that boxes that were started together do not end together.
"""

import math
from dataclasses import dataclass
from typing import NewType

Label = NewType("Label", str)

HOUR_S = 3600.0
# A box's life is shortened by at most this share.
LIFE_SPREAD = 0.25
# A clock may be corrected by this much while the machine restarts.
CLOCK_STEP_S = 60.0
# Relative rounding error of sums of floats.
BUDGET_SLACK = 1e-9


@dataclass(frozen=True, slots=True)
class Budget:
    """The most that rented boxes may cost."""

    usd_per_h: float
    usd_total: float  # for the whole run, across restarts


@dataclass(frozen=True, slots=True)
class RentOffer:
    """A kind of box that a provider has."""

    provider: str
    name: str
    usd_per_h: float
    trajectories_per_h: float  # of one box, until it is measured
    count_max: int  # boxes at a time
    availability: float = 1.0
    # The price of receiving and passing on 10^9 bytes. It counts in the choice of boxes but not in the
    # budget, because traffic is not metered here.
    usd_per_gb: float = 0.0

    @property
    def mu(self) -> float:
        """Trajectories/s on average."""
        return self.trajectories_per_h / HOUR_S * self.availability


@dataclass(frozen=True, slots=True)
class Terms:
    """The promises and the limits of one provider."""

    provider: str
    command_s: float  # the longest time that a command takes
    # Lists show the effect of a start or stop at most this long after the command ended. A running box is never missing
    # from lists for this long, and between two absences at least one list that was read names it.
    settle_s: float
    list_every_s: float  # between two lists
    billed_by_s: float  # the unit of billing
    grace_s: float  # see the module docstring


@dataclass(frozen=True, slots=True)
class Rental:
    """One box: the row that the run's book keeps."""

    label: Label
    provider: str
    offer: str
    usd_per_h: float
    billed_by_s: float
    sent_at: float
    life_s: float
    grace_s: float
    # The most boxes that one list has shown under this label; it should be 1.
    copies: int = 1
    gone_at: float | None = None
    seen: bool = False  # whether a list has shown the box

    @property
    def until(self) -> float:
        return self.sent_at + self.life_s + self.grace_s

    def cost_usd(self, at: float) -> float:
        """What the box costs from `sent_at` to `at`, or to `gone_at` if that is known."""
        end = at if self.gone_at is None else self.gone_at
        return _cost_usd(
            self.usd_per_h * self.copies, max(0.0, end - self.sent_at), self.billed_by_s
        )

    def committed_usd(self, now: float) -> float:
        """What the box has cost, and what is set aside for it."""
        return self.cost_usd(max(now, self.until))

    @property
    def rate(self) -> float:
        """The present usd/h."""
        return self.usd_per_h * self.copies if self.gone_at is None else 0.0


def _cost_usd(usd_per_h: float, duration_s: float, billed_by_s: float) -> float:
    units = math.ceil(duration_s / billed_by_s * (1 - BUDGET_SLACK))
    return usd_per_h * units * billed_by_s / HOUR_S


def life_s(
    number: int,
    offer: RentOffer,
    terms: Terms,
    budget: Budget,
    *,
    committed_usd: float,
    usd_per_h: float,
    longest_s: float,
) -> float | None:
    """The life of a new box, the `number`-th of the run; None: the budget has no room for it.

    committed_usd, usd_per_h: the sums over all boxes before the new one. If its life would be under ten minutes, the
    budget has no room.
    """
    room = budget.usd_per_h - usd_per_h
    left_usd = budget.usd_total - committed_usd
    if offer.usd_per_h > room * (1 + BUDGET_SLACK) or left_usd <= 0:
        return None
    paid_s = left_usd / max(room, offer.usd_per_h) * HOUR_S
    paid_s = math.floor(paid_s / terms.billed_by_s) * terms.billed_by_s
    life = min(longest_s, paid_s - terms.grace_s)
    # The factor is the golden ratio - 1: the fractional parts of its multiples spread evenly over 0 to 1.
    life -= life * LIFE_SPREAD * (number * 0.6180339887498949 % 1.0)
    # A shorter life is not worth the download of a version.
    return life if life >= min(600.0, longest_s * (1 - LIFE_SPREAD)) else None


@dataclass(frozen=True, slots=True)
class Moment:
    """What a machine's clocks show at one moment."""

    boot: str  # identifies the machine's present boot
    since_boot_s: float  # counts sleep, and cannot be set
    unix_s: float  # can be set


def rent_time(at: float, before: Moment, after: Moment, *, horizon: float) -> float:
    """The rent clock at the moment `after`, if it was `at` at the moment `before`. In doubt, the result is too late
    rather than too early.

    The clock that cannot be set counts in full. If the clock that can be set has advanced further, a
    virtual machine may have stood still: that time counts, too, but only up to `horizon`, when all
    boxes have ended. If that clock was set back while the machine was off, the result is `horizon`.
    """
    same = before.boot == after.boot
    sure_s = max(0.0, after.since_boot_s - before.since_boot_s) if same else after.since_boot_s
    told_s = after.unix_s - before.unix_s + (0.0 if same else CLOCK_STEP_S)
    if not same and told_s < 0:
        told_s = math.inf
    beyond = told_s > sure_s + (CLOCK_STEP_S if same else 0.0)
    return max(at + sure_s, min(at + told_s, horizon)) if beyond else at + sure_s
