"""The hours in which the owner of a box lets its worker work."""

import pytest

from echo2d.core.worker.working_hours import reason_to_wait

NIGHT, NOON = (22 * 60, 7 * 60), (12 * 60, 13 * 60)


@pytest.mark.parametrize(
    ("minute", "windows", "reason"),
    [
        (0, (), ""),
        (22 * 60, (NIGHT,), ""),
        (23 * 60 + 59, (NIGHT,), ""),
        (0, (NIGHT,), ""),
        (6 * 60 + 59, (NIGHT,), ""),
        (7 * 60, (NIGHT,), "outside its hours; starts again at 22:00"),
        (7 * 60, (NIGHT, NOON), "outside its hours; starts again at 12:00"),
        (12 * 60 + 30, (NIGHT, NOON), ""),
        (13 * 60, (NIGHT, NOON), "outside its hours; starts again at 22:00"),
        (21 * 60 + 59, (NOON,), "outside its hours; starts again at 12:00"),
        (23 * 60, ((18 * 60, 0),), ""),
        (0, ((18 * 60, 0),), "outside its hours; starts again at 18:00"),
    ],
)
def test_hours_may_span_midnight(
    minute: int, windows: tuple[tuple[int, int], ...], reason: str
) -> None:
    assert reason_to_wait(minute, windows, paused=False, others=()) == reason


def test_the_owners_pause_is_checked_first_and_the_gpu_last() -> None:
    outside = 8 * 60
    assert reason_to_wait(outside, (NIGHT,), paused=True, others=(7,)) == "paused by its owner"
    assert "hours" in reason_to_wait(outside, (NIGHT,), paused=False, others=(7,))
    busy = reason_to_wait(0, (NIGHT,), paused=False, others=(7, 8))
    assert busy == "another program is on a GPU: process 7"
