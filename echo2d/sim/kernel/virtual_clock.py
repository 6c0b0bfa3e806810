"""Virtual time: calls that are due later, in the order of their time, and of their making where that is the same."""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Clock:
    """now: seconds since the start. Time passes only in `step`."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._made = 0

    def at(self, time: float, act: Callable[..., None], *arguments: Any) -> None:
        """Calls act(*arguments) at this time, which is not past."""
        self._made += 1
        heappush(self._due, (time, self._made, act, arguments))

    def after(self, delay: float, act: Callable[..., None], *arguments: Any) -> None:
        self.at(self.now + delay, act, *arguments)

    def step(self, limit: float) -> bool:
        """Makes the next call. False if there is none up to the limit."""
        if not self._due or self._due[0][0] > limit:
            return False
        self.now, _, act, arguments = heappop(self._due)
        act(*arguments)
        return True
