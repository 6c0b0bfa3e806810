"""The rent clock of a run: reads this machine's clocks and feeds them to `rent_time`.

The rent clock continues across restarts of the coordinator and of the machine, and never runs backwards.
"""

import logging
import math
import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from echo2d.core.renting.budget import CLOCK_STEP_S, Moment, Rental, rent_time

log = logging.getLogger("echo2d.renting")


@cache
def boot_id() -> str:
    """The id of this boot. It may be cached, because no process outlives the boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def moment() -> Moment:
    """The present moment by this machine's clocks."""
    return Moment(boot_id(), time.clock_gettime(time.CLOCK_BOOTTIME), time.time())


class RentClock:
    """Seconds since the run first rented.

    kept: the time that was stored last, from which the clock continues; None: it starts at 0.
    """

    def __init__(self, kept: tuple[float, Moment] | None, rentals: Iterable[Rental]) -> None:
        self._since = moment()
        self._at, before = (0.0, self._since) if kept is None else kept
        horizon = max(
            (rental.until for rental in rentals if rental.gone_at is None), default=-math.inf
        )
        self._at = rent_time(self._at, before, self._since, horizon=horizon)

    def now(self) -> float:
        """The time by the boot clock alone. Only `look` corrects it by the other clocks."""
        return self._at + time.clock_gettime(time.CLOCK_BOOTTIME) - self._since.since_boot_s

    def look(self, horizon: float) -> float:
        """Correct the time by all clocks, and return it. horizon: the time when all boxes have ended."""
        moved = moment()
        at = rent_time(self._at, self._since, moved, horizon=horizon)
        if at > self.now() + CLOCK_STEP_S:
            # A virtual machine was paused with its boot clock, or the wall clock was set forward.
            # Boxes may have been billed for that time, so it counts.
            log.warning("clock_leapt seconds=%.0f: boxes are billed for it", at - self.now())
        self._at, self._since = at, moved
        return at
