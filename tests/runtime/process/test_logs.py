"""One line a fact, whatever others say and how often."""

import json
import logging
import sys
from collections.abc import Callable

import pytest

from echo2d.runtime.process.logs import (
    FORMAT,
    LINES_PER_S_MAX,
    STORY,
    JsonLine,
    OneLine,
    Throttle,
    present,
    say,
    start_logging,
)


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


def test_the_story_has_no_holes() -> None:
    passes: Callable[[logging.LogRecord], object] = Throttle().filter
    told = logging.LogRecord(STORY, logging.INFO, __file__, 1, "%s", ("leased",), None)
    assert all(passes(told) for _ in range(3 * LINES_PER_S_MAX))


def test_a_flood_of_one_kind_does_not_hide_another(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("echo2d.test")
    caplog.set_level(logging.INFO)
    for _ in range(LINES_PER_S_MAX + 1):
        say(log, logging.INFO, "refused")
    say(log, logging.INFO, "frame", "an accusation")
    throttle = Throttle()
    for made in caplog.records:
        made.created = 0.0
    passed = [made for made in caplog.records if throttle.filter(made)]
    assert len(passed) == LINES_PER_S_MAX + 1
    assert passed[-1].getMessage() == "frame an accusation"


def test_text_and_json_say_the_same(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    say(
        logging.getLogger("echo2d.test"),
        logging.INFO,
        "frozen",
        'for\n"good"',
        step=3,
        group=[1, 2],
        reason=None,
    )
    say(logging.getLogger("echo2d.test"), logging.DEBUG, "unseen")
    (made,) = caplog.records
    assert (
        OneLine(FORMAT)
        .format(made)
        .endswith('area=echo2d.test frozen step=3 group=1 group=2 for "good"')
    )
    line = JsonLine().format(made)
    assert "\n" not in line
    found = json.loads(line)
    assert found.pop("time")
    assert found == {
        "level": "info",
        "area": "echo2d.test",
        "message": 'frozen step=3 group=1 group=2 for\n"good"',
        "kind": "frozen",
        "step": 3,
        "group": [1, 2],
    }


def test_a_traceback_is_in_its_line() -> None:
    try:
        int("x")
    except ValueError:
        made = logging.LogRecord(
            "echo2d.test", logging.ERROR, __file__, 1, "failed", (), sys.exc_info()
        )
    assert "ValueError: invalid literal" in json.loads(JsonLine().format(made))["traceback"]


def test_a_child_logs_like_its_parent() -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers.clear()
    try:
        for expected in ((logging.DEBUG, True), (logging.INFO, False)):
            start_logging(expected[0], as_json=expected[1])
            assert present() == expected
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
