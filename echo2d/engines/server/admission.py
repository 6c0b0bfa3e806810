"""Limits how many samples run in a server at once: enough to fill it, not so many that it thrashes.
Pure.

A sample for which the server has no memory slows other samples down: to make room, the server drops the KV
cache of a running sample and computes it again later. So the limit follows the load that the server reports. It
shrinks while requests wait for memory, and grows slowly while memory is free. New samples wait here, in order.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

# Shares of the KV memory in use. Above FULL, waiting requests wait for memory; below FREE, there is
# room for more; in between, the limit stays.
USAGE_FULL = 0.9
USAGE_FREE = 0.8
SHRINK = 0.85


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """The load of all data-parallel ranks together."""

    running: int
    waiting: int
    token_usage: float  # share of the KV memory in use on the fullest rank
    running_max: int


def next_limit(limit: int, slots: int, load: ServerLoad) -> int:
    """The limit after this load: at least 1, at most `slots` and `load.running_max`."""
    most = max(1, min(slots, load.running_max))
    if load.waiting and load.token_usage > USAGE_FULL:
        return max(1, min(most, int(min(limit, load.running + load.waiting) * SHRINK)))
    if load.token_usage < USAGE_FREE:
        return min(most, limit + max(1, limit // 16))
    return min(most, limit)


class SampleAdmission:
    """The samples that run in the server (`inside`) and a queue of those that wait, in order."""

    def __init__(self, slots: int) -> None:
        self.slots = self.limit = slots
        self.inside = 0
        self._waiting: deque[Callable[[], None]] = deque()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def look(self, load: ServerLoad) -> None:
        self.limit = next_limit(self.limit, self.slots, load)
        self._admit()

    def enter(self, admitted: Callable[[], None]) -> None:
        self._waiting.append(admitted)
        self._admit()

    def give_up(self, admitted: Callable[[], None]) -> None:
        """Leave the queue."""
        self._waiting.remove(admitted)

    def leave(self) -> None:
        self.inside -= 1
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self.inside < self.limit:
            self.inside += 1
            self._waiting.popleft()()

    def check(self) -> None:
        assert 0 <= self.inside <= self.slots
        assert 1 <= self.limit <= self.slots
        assert not self._waiting or self.inside >= self.limit
