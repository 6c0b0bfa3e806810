"""Keeps answers that take long to make from holding up everything else that the event loop does.

    asked --the last answer was cheap, or is old enough--> made anew
      +---- otherwise ----------------------------------> the last answer again

A status of a thousand workers takes tens of milliseconds in which no lease is granted, and anybody
who may read it may ask as often as they like. What is cheap to make is always made anew.
"""

import time
from collections.abc import Callable
from typing import Generic, TypeVar

CHEAP_S = 0.005  # of CPU time: the run has some hundred workers at most
SHARE_MAX = 0.02  # of the loop's time, for one kind of answer

T = TypeVar("T")


class CostlyAnswer(Generic[T]):
    """See the module docstring. make: makes the answer as of now.

    clock, cpu: seconds of the monotonic clock, and of this thread's CPU.
    """

    def __init__(
        self,
        make: Callable[[], T],
        *,
        clock: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = time.thread_time,
    ) -> None:
        self._make, self._clock, self._cpu = make, clock, cpu
        self._last: T | None = None
        self._lasts_until = clock()

    def get(self) -> T:
        now = self._clock()
        if self._last is None or now >= self._lasts_until:
            began = self._cpu()
            self._last = self._make()
            took_s = self._cpu() - began
            self._lasts_until = now if took_s < CHEAP_S else now + took_s / SHARE_MAX
        return self._last
