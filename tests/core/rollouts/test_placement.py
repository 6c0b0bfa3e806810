"""All samples of a group are placed, or none."""

from collections.abc import Iterator

import pytest

from echo2d.core.base.ids import PeerId
from echo2d.core.rollouts.placement import FreeSlots, place


class Rooms:
    """These rooms, best first."""

    def __init__(self, *sizes: tuple[int, int]) -> None:
        self._rooms = [
            FreeSlots(PeerId(f"w{index}"), slots, free) for index, (slots, free) in enumerate(sizes)
        ]
        self.slots, self.free = sum(slots for slots, _ in sizes), sum(free for _, free in sizes)

    def __iter__(self) -> Iterator[FreeSlots]:
        return (room for room in self._rooms if room.free)

    def with_free(self, samples: int) -> FreeSlots | None:
        return next((room for room in self._rooms if room.free >= samples), None)


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ([(8, 8), (8, 8)], {"w0": 4}),  # the best has room
        ([(8, 2), (8, 5)], {"w1": 4}),  # another one has room for all
        ([(8, 3), (8, 2)], {"w0": 3, "w1": 1}),  # only together
        ([(8, 3), (8, 1), (8, 2)], {"w0": 3, "w1": 1}),  # nobody beyond those that are needed
        ([(8, 3)], {}),  # not now
        ([(2, 2)], {"w0": 4}),  # never at once: in two leases, one after the other
        ([(2, 2), (1, 1)], {"w0": 3, "w1": 1}),
        ([(2, 1), (1, 1)], {}),  # too small and busy
        ([], {}),
    ],
)
def test_place(sizes: list[tuple[int, int]], parts: dict[str, int]) -> None:
    placed = place(range(4), Rooms(*sizes))
    assert sorted(sample for _, samples in placed for sample in samples) == (
        list(range(4)) if parts else []
    )
    assert {worker: sum(len(s) for w, s in placed if w == worker) for worker, _ in placed} == parts
    assert all(len(samples) <= sizes[int(worker[1:])][0] for worker, samples in placed)
