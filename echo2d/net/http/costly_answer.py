"""Reuses answers that take long to make, so that they do not block the event loop.

    asked --the last answer was cheap, or is old enough--> a new answer
      +---- otherwise ----------------------------------> the last answer again
    an order was given --> the last answer is dropped: the next one shows what the order did

A status of a thousand workers takes tens of milliseconds, in which no lease is granted, and every
reader may ask as often as it likes. A cheap answer is always made again, except where very many
callers may ask for it (`cheap_s` is 0 there).
"""

import time
from collections.abc import Callable
from typing import Generic, TypeVar

CHEAP_S = 0.005  # seconds of CPU; the status of up to some hundred workers takes less
ANSWER_SHARE_MAX = 0.02  # of the loop's time, for one kind of answer

T = TypeVar("T")


class CostlyAnswer(Generic[T]):
    """See the module docstring. make: makes the answer.

    cheap_s: an answer that takes less CPU time is always made again; 0: none is.
    clock, cpu: read seconds of the monotonic clock, and of this thread's CPU time.
    """

    def __init__(
        self,
        make: Callable[[], T],
        *,
        cheap_s: float = CHEAP_S,
        clock: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = time.thread_time,
    ) -> None:
        self._make, self._cheap_s, self._clock, self._cpu = make, cheap_s, clock, cpu
        self._last: T | None = None
        self._lasts_until = clock()

    def get(self) -> T:
        now = self._clock()
        if self._last is None or now >= self._lasts_until:
            began = self._cpu()
            self._last = self._make()
            took_s = self._cpu() - began
            self._lasts_until = now if took_s < self._cheap_s else now + took_s / ANSWER_SHARE_MAX
        return self._last

    def forget(self) -> None:
        """Drop the last answer, so that the next call makes one."""
        self._last = None
