"""Boxes that are rented, what each has cost and may still cost, and how long the next one may live on what is left.

    label      a box's name, by which its provider knows it, too; never used twice
    sent_at    its start command was sent: from then on it is paid for, whatever became of the command
    life_s     the coordinator stops it so long after `sent_at`, and it is told to end by itself so long after it began
    grace_s    what the start and the end may take beside that
    until      sent_at + life_s + grace_s: gone by then even if the coordinator has died
    gone_at    a list showed that it is not there any more

Times are seconds of the run's rent clock, which only grows (`rent_time`). A box costs its price from `sent_at` to
`gone_at`, a started unit of `billed_by_s` in full. Until it is gone all of it to `until` is set aside: the sum of what
was spent and what is set aside, `committed_usd`, is held below the budget's total when a box is started, and nothing
that happens later makes it grow, unless a box outlives `until`.

The life of a new box: of what is left, its share of the usd/h that are free, so that the money lasts equally long for
all that may still be started. Worked example: 10 usd in all, 2 usd/h, boxes of 0.5 usd/h. The first one gets
0.5/2 of 10 usd = 2.5 usd: 5 h, as do the next three: 0.5/1.5 of 7.5 usd, ...; the total is then set aside.
Each life is shortened by up to LIFE_SPREAD, so that boxes started together do not end together.
"""

import math
from dataclasses import dataclass
from typing import NewType

Label = NewType("Label", str)

HOUR_S = 3600.0
LIFE_S_MIN = 600.0  # less is not worth fetching a version for
LIFE_SPREAD = 0.25  # of the life that it could have
GOLDEN = 0.6180339887498949  # its multiples, without their whole parts, are spread evenly
CLOCK_STEP_S = 60.0  # by which a clock may be corrected while the machine restarts
SLACK = 1e-9  # of an amount: sums of floats


@dataclass(frozen=True, slots=True)
class Budget:
    usd_per_h: float
    usd_total: float  # of the whole run, whatever was restarted in between


@dataclass(frozen=True, slots=True)
class RentOffer:
    """A kind of box that a provider has. trajectories_per_h: of one, until it is measured. count_max: at a time.

    usd_per_gb: of 10^9 bytes that come and go on. It counts in the choice, not in the budget: nobody meters it here.
    """

    provider: str
    name: str
    usd_per_h: float
    trajectories_per_h: float
    count_max: int
    availability: float = 1.0
    usd_per_gb: float = 0.0

    @property
    def mu(self) -> float:
        """Trajectories/s on average."""
        return self.trajectories_per_h / HOUR_S * self.availability


@dataclass(frozen=True, slots=True)
class Terms:
    """Of one provider. command_s: each of its commands takes at most; list_every_s: between two lists.

    settle_s: what start and stop did is in its lists no later than this after they ended, and no box that runs is left
    out for so long, nor again before a list that was read has named it.
    """

    provider: str
    command_s: float
    settle_s: float
    list_every_s: float
    billed_by_s: float
    grace_s: float


@dataclass(frozen=True, slots=True)
class Rental:
    """One box, as it is kept. copies: boxes that a list has shown under this label at a time; 1 is right.

    seen: a list has shown it.
    """

    label: Label
    provider: str
    offer: str
    usd_per_h: float
    billed_by_s: float
    sent_at: float
    life_s: float
    grace_s: float
    copies: int = 1
    gone_at: float | None = None
    seen: bool = False

    @property
    def until(self) -> float:
        return self.sent_at + self.life_s + self.grace_s

    def cost_usd(self, at: float) -> float:
        """From the start to this moment, or to its end if that came before."""
        end = at if self.gone_at is None else self.gone_at
        return _cost_usd(
            self.usd_per_h * self.copies, max(0.0, end - self.sent_at), self.billed_by_s
        )

    def committed_usd(self, now: float) -> float:
        """What it cost, and what is set aside for it."""
        return self.cost_usd(max(now, self.until))

    @property
    def rate(self) -> float:
        """usd/h now."""
        return self.usd_per_h * self.copies if self.gone_at is None else 0.0


def _cost_usd(usd_per_h: float, duration_s: float, billed_by_s: float) -> float:
    units = math.ceil(duration_s / billed_by_s * (1 - SLACK))
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
    """Of a new box, the `number`-th of the run, beside those that commit so much and cost so much an hour.

    None: the budget has no room for it, or not for LIFE_S_MIN.
    """
    room = budget.usd_per_h - usd_per_h
    left_usd = budget.usd_total - committed_usd
    if offer.usd_per_h > room * (1 + SLACK) or left_usd <= 0:
        return None
    paid_s = left_usd / max(room, offer.usd_per_h) * HOUR_S
    paid_s = math.floor(paid_s / terms.billed_by_s) * terms.billed_by_s
    life = min(longest_s, paid_s - terms.grace_s)
    life -= life * LIFE_SPREAD * (number * GOLDEN % 1.0)
    return life if life >= min(LIFE_S_MIN, longest_s * (1 - LIFE_SPREAD)) else None


@dataclass(frozen=True, slots=True)
class Moment:
    """What a machine's clocks say. boot: of its present run; since_boot_s: counts sleep; unix_s: may be set."""

    boot: str
    since_boot_s: float
    unix_s: float


def rent_time(at: float, before: Moment, after: Moment, *, horizon: float) -> float:
    """The rent clock, which stood at `at` before: rather too far than not far enough.

    A clock that cannot be set counts in full. What one that can be set says beyond it counts as well, for a virtual
    machine may have stood still, but no further than to `horizon`, when the time of all boxes is over; and as far as
    that if it was set back while the machine was off.
    """
    same = before.boot == after.boot
    sure_s = max(0.0, after.since_boot_s - before.since_boot_s) if same else after.since_boot_s
    told_s = after.unix_s - before.unix_s + (0.0 if same else CLOCK_STEP_S)
    if not same and told_s < 0:
        told_s = math.inf
    beyond = told_s > sure_s + (CLOCK_STEP_S if same else 0.0)
    return max(at + sure_s, min(at + told_s, horizon)) if beyond else at + sure_s
