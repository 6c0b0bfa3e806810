"""Which workers get the samples of a group: all of them are placed, or none.

One worker gets them all if one has room; otherwise they are split over the best ones; and if even all of these,
empty, were too small together, each gets as many as it has slots until all are placed (workers queue what is over).
Not here: which workers may write for the group, and their ranking.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from echo2d.core.ids import PeerId


@dataclass(frozen=True, slots=True)
class Room:
    """A worker with this many slots, of which `free` are not taken by leases."""

    worker: PeerId
    slots: int
    free: int


def place(samples: Sequence[int], rooms: Sequence[Room]) -> list[tuple[PeerId, tuple[int, ...]]]:
    """(worker, its samples), best worker first in `rooms`; empty when there is no room for all of them now."""
    for room in rooms:
        if room.free >= len(samples):
            return [(room.worker, tuple(samples))]
    if sum(room.free for room in rooms) >= len(samples):
        return _deal(samples, rooms)
    if sum(room.slots for room in rooms) < len(samples) and all(room.free == room.slots for room in rooms):
        rounds = -(-len(samples) // max(1, sum(room.slots for room in rooms)))
        return _deal(samples, [room for _ in range(rounds) for room in rooms])
    return []


def _deal(samples: Sequence[int], rooms: Sequence[Room]) -> list[tuple[PeerId, tuple[int, ...]]]:
    """Fill the rooms in their order."""
    placed, start = [], 0
    for room in rooms:
        part = tuple(samples[start : start + room.free])
        if part:
            placed.append((room.worker, part))
        start += room.free
    return placed
