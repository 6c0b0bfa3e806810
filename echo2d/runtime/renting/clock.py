"""The rent clock of a run: a machine's clocks, read. What they come to is decided in `core/renting/budget.py`."""

import logging
import math
import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from echo2d.core.renting.budget import CLOCK_STEP_S, Moment, Rental, rent_time

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

log = logging.getLogger("echo2d.renting")


@cache
def boot_id() -> str:
    """Of this start of the machine, which no process outlives."""
    return BOOT_ID.read_text().strip()


def moment() -> Moment:
    """Now, by this machine's clocks."""
    return Moment(boot_id(), time.clock_gettime(time.CLOCK_BOOTTIME), time.time())


class RentClock:
    """Seconds since the run first rented; goes on where it was."""

    def __init__(self, kept: tuple[float, Moment] | None, rentals: Iterable[Rental]) -> None:
        self._since = moment()
        self._at, before = (0.0, self._since) if kept is None else kept
        horizon = max(
            (rental.until for rental in rentals if rental.gone_at is None), default=-math.inf
        )
        self._at = rent_time(self._at, before, self._since, horizon=horizon)

    def now(self) -> float:
        return self._at + time.clock_gettime(time.CLOCK_BOOTTIME) - self._since.since_boot_s

    def look(self, horizon: float) -> float:
        """Now, by all clocks. horizon: when the time of all boxes is over."""
        moved = moment()
        at = rent_time(self._at, self._since, moved, horizon=horizon)
        if at > self.now() + CLOCK_STEP_S:
            log.warning("clock_leapt seconds=%.0f: boxes are billed for it", at - self.now())
        self._at, self._since = at, moved
        return at
