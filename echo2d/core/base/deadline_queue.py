"""The earliest of many deadlines, most of which move later and later: a heap that notices that when it looks.

An entry of the heap is never later than its deadline; one that turns out to be earlier is put back where it belongs.
So a deadline that moves later costs nothing until it would have come first, and one that moves earlier, or begins,
is told with `set`. Not here: what a deadline means, and for whom it is.
"""

import heapq
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

SLACK = 64  # entries of the heap beyond twice those that count, before the others are swept out

Key = TypeVar("Key", bound=Hashable)


class DeadlineQueue(Generic[Key]):
    """See the module docstring. `due` tells the deadline of a key; None: it has none (any more)."""

    def __init__(self, due: Callable[[Key], float | None]) -> None:
        self._due = due
        self._heap: list[tuple[float, int, Key]] = []
        self._entries: dict[Key, tuple[float, int, Key]] = {}  # the one that counts, of each key
        self._count = 0  # breaks ties, so that keys need no order

    def set(self, key: Key) -> None:
        """The key's deadline has begun, or may be earlier than before."""
        at, known = self._due(key), self._entries.get(key)
        if at is not None and (known is None or at < known[0]):
            self._put(key, at)

    def first(self) -> tuple[float, Key] | None:
        """The earliest deadline and whose it is; None: there is none."""
        while self._heap:
            entry = self._heap[0]
            at, _, key = entry
            counts = self._entries.get(key) is entry
            due = self._due(key) if counts else None
            if due is not None and due <= at:
                return at, key
            heapq.heappop(self._heap)
            if due is not None:
                self._put(key, due)
            elif counts:
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
        if len(self._heap) > SLACK + 2 * len(self._entries):
            self._heap = sorted(self._entries.values())

    def check(self, keys: Iterable[Key]) -> None:
        """`keys`: all that may have a deadline."""
        for key in keys:
            due = self._due(key)
            assert due is None or self._entries[key][0] <= due, (
                "a deadline moved earlier and nobody said so"
            )
        assert len(self._heap) <= SLACK + 2 * len(self._entries)
        held = set(map(id, self._heap))
        assert all(id(entry) in held for entry in self._entries.values())
        assert all(self._heap[(at - 1) // 2] <= self._heap[at] for at in range(1, len(self._heap)))
