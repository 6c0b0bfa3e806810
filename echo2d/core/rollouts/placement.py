"""Which workers get the samples of a group: all of them are placed, or none.

One worker gets them all if one has room; otherwise they are split over the best ones; and if even all of these,
empty, were too small together, each gets as many as it has slots until all are placed (workers queue what is over).
Not here: which workers may write for the group, and their ranking.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from echo2d.core.base.ids import PeerId


@dataclass(frozen=True, slots=True)
class FreeSlots:
    """A worker with this many slots, of which `free` are not taken by leases."""

    worker: PeerId
    slots: int
    free: int


class SlotsByWorker(Protocol):
    """The rooms to choose from, best first. slots, free: of all of them together."""

    slots: int
    free: int

    def __iter__(self) -> Iterator[FreeSlots]:
        """Those with a free slot."""

    def with_free(self, samples: int) -> FreeSlots | None:
        """The best one that has room for so many."""


def place(samples: Sequence[int], rooms: SlotsByWorker) -> list[tuple[PeerId, tuple[int, ...]]]:
    """(worker, its samples), best worker first; empty when there is no room for all of them now."""
    if (room := rooms.with_free(len(samples))) is not None:
        return [(room.worker, tuple(samples))]
    if rooms.free >= len(samples):
        return _deal(samples, rooms)
    if rooms.slots < len(samples) and rooms.free == rooms.slots:
        rounds = -(-len(samples) // max(1, rooms.slots))
        return _deal(samples, [room for _ in range(rounds) for room in rooms])
    return []


def _deal(
    samples: Sequence[int], rooms: Iterable[FreeSlots]
) -> list[tuple[PeerId, tuple[int, ...]]]:
    """Fill the rooms in their order."""
    placed, start = [], 0
    for room in rooms:
        if start >= len(samples):
            break
        placed.append((room.worker, tuple(samples[start : start + room.free])))
        start += room.free
    return placed
