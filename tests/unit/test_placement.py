"""All samples of a group are placed, or none."""

import pytest

from echo2d.core.ids import PeerId
from echo2d.core.placement import Room, place


def rooms(*sizes: tuple[int, int]) -> list[Room]:
    return [Room(PeerId(f"w{index}"), slots, free) for index, (slots, free) in enumerate(sizes)]


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ([(8, 8), (8, 8)], {"w0": 4}),  # the best has room
        ([(8, 2), (8, 5)], {"w1": 4}),  # another one has room for all
        ([(8, 3), (8, 2)], {"w0": 3, "w1": 1}),  # only together
        ([(8, 3)], {}),  # not now
        ([(2, 2)], {"w0": 4}),  # never at once: in two leases, one after the other
        ([(2, 2), (1, 1)], {"w0": 3, "w1": 1}),
        ([(2, 1), (1, 1)], {}),  # too small and busy
        ([], {}),
    ],
)
def test_place(sizes: list[tuple[int, int]], parts: dict[str, int]) -> None:
    placed = place(range(4), rooms(*sizes))
    assert sorted(sample for _, samples in placed for sample in samples) == (list(range(4)) if parts else [])
    assert {worker: sum(len(s) for w, s in placed if w == worker) for worker, _ in placed} == parts
    slots = {room.worker: room.slots for room in rooms(*sizes)}
    assert all(len(samples) <= slots[worker] for worker, samples in placed)
