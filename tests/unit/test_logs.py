"""One line a fact, whatever others say and how often."""

import logging
from collections.abc import Callable

from echo2d.runtime.logs import FORMAT, LINES_PER_S_MAX, OneLine, Throttle


def record(text: str, *values: object, second: int = 0) -> logging.LogRecord:
    made = logging.LogRecord("echo2d.test", logging.INFO, __file__, 1, text, values, None)
    made.created = float(second)
    return made


def test_a_message_is_one_printable_line() -> None:
    line = OneLine(FORMAT).format(record("name=%s", "box\nlevel=CRITICAL all is lost\x1b[2J"))
    assert line.endswith("level=INFO area=echo2d.test name=box level=CRITICAL all is lost [2J")


def test_a_flood_is_cut_and_counted() -> None:
    passes: Callable[[logging.LogRecord], object] = Throttle().filter
    kept = [number for number in range(3 * LINES_PER_S_MAX) if passes(record("%s", number))]
    assert kept == list(range(LINES_PER_S_MAX))
    assert passes(record("another fact"))
    later = record("%s", "on", second=1)
    assert passes(later)
    assert later.getMessage() == f"(held_back={2 * LINES_PER_S_MAX}) on"
    following = record("%s", "on", second=2)
    assert passes(following)
    assert following.getMessage() == "on"
