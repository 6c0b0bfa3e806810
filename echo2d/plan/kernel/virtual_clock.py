"""Keeps virtual time: runs scheduled calls in the order of their times. Calls with the same time run in the order in
which they were scheduled.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Clock:
    """The clock. now: seconds since the start; it advances only in `step`."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._made = 0

    def at(self, time: float, act: Callable[..., None], *arguments: Any) -> None:
        """Schedule act(*arguments) for a time that is not in the past."""
        self._made += 1
        heappush(self._due, (time, self._made, act, arguments))

    def after(self, delay: float, act: Callable[..., None], *arguments: Any) -> None:
        self.at(self.now + delay, act, *arguments)

    def step(self, limit: float) -> bool:
        """Run the next call and return True; return False if no call is due up to the limit."""
        if not self._due or self._due[0][0] > limit:
            return False
        self.now, _, act, arguments = heappop(self._due)
        act(*arguments)
        return True
