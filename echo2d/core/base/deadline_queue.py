"""Find the earliest of many deadlines, most of which keep moving later: a heap with lazy updates.

Kept true: a heap entry is never later than its key's deadline. When an entry reaches the top and its
deadline has moved later, it is pushed again at the new time. So a deadline that moves later costs
nothing until then; one that begins or moves earlier must be announced with `set`.
Not here: what the deadlines mean.
"""

import heapq
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

# Outdated heap entries are swept out once there are this many more of them than current ones.
STALE_ENTRIES = 64

Key = TypeVar("Key", bound=Hashable)


class DeadlineQueue(Generic[Key]):
    """See the module docstring. `due` returns the present deadline of a key, or None if it has
    none.
    """

    def __init__(self, due: Callable[[Key], float | None]) -> None:
        self._due = due
        self._heap: list[tuple[float, int, Key]] = []
        self._entries: dict[Key, tuple[float, int, Key]] = {}  # the current entry of each key
        self._count = 0  # breaks ties, so that keys are never compared

    def set(self, key: Key) -> None:
        """Announce that the key's deadline has begun, or may have moved earlier."""
        at, known = self._due(key), self._entries.get(key)
        if at is not None and (known is None or at < known[0]):
            self._put(key, at)

    def first(self) -> tuple[float, Key] | None:
        """Return the earliest deadline and its key, or None if no key has a deadline."""
        while self._heap:
            entry = self._heap[0]
            at, _, key = entry
            current = self._entries.get(key) is entry
            due = self._due(key) if current else None
            if due is not None and due <= at:
                return at, key
            heapq.heappop(self._heap)
            if due is not None:
                self._put(key, due)
            elif current:
                del self._entries[key]
                self._sweep()
        return None

    def earliest(self) -> float | None:
        first = self.first()
        return None if first is None else first[0]

    def _put(self, key: Key, at: float) -> None:
        self._count += 1
        self._entries[key] = entry = (at, self._count, key)
        heapq.heappush(self._heap, entry)
        self._sweep()

    def _sweep(self) -> None:
        if len(self._heap) > STALE_ENTRIES + 2 * len(self._entries):
            self._heap = sorted(self._entries.values())

    def check(self, keys: Iterable[Key]) -> None:
        """Assert all invariants. keys: all that may have a deadline."""
        for key in keys:
            due = self._due(key)
            assert due is None or self._entries[key][0] <= due, (
                "a deadline moved earlier without a call of `set`"
            )
        assert len(self._heap) <= STALE_ENTRIES + 2 * len(self._entries)
        held = set(map(id, self._heap))
        assert all(id(entry) in held for entry in self._entries.values())
        assert all(self._heap[(at - 1) // 2] <= self._heap[at] for at in range(1, len(self._heap)))
