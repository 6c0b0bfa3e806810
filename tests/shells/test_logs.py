"""One line per fact, whatever other machines send and how often."""

import json
import logging
import re
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import pytest

from echo2d.errors import OperatorFault
from echo2d.logs import (
    FORMAT,
    LINES_PER_S_MAX,
    STORY,
    JsonLine,
    LogFile,
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


def test_a_message_is_logged_as_one_printable_line() -> None:
    line = OneLine(FORMAT).format(record("name=%s", "box\nlevel=CRITICAL all is lost\x1b[2J"))
    assert line.endswith("level=INFO area=echo2d.test name=box level=CRITICAL all is lost [2J")


def test_a_flood_of_messages_is_cut_and_counted() -> None:
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


def test_messages_about_the_story_of_a_run_are_never_dropped() -> None:
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


def test_text_and_json_logs_have_the_same_facts(caplog: pytest.LogCaptureFixture) -> None:
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


def test_a_traceback_is_logged_in_its_line() -> None:
    try:
        int("x")
    except ValueError:
        made = logging.LogRecord(
            "echo2d.test", logging.ERROR, __file__, 1, "failed", (), sys.exc_info()
        )
    assert "ValueError: invalid literal" in json.loads(JsonLine().format(made))["traceback"]


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger, which is put back afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers.clear()
    yield root
    for handler in root.handlers:
        handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_child_process_logs_like_its_parent(root: logging.Logger, tmp_path: Path) -> None:
    for expected in (
        (logging.DEBUG, True, None),
        (logging.INFO, False, None),
        (logging.INFO, True, tmp_path / "log"),
    ):
        start_logging(expected[0], as_json=expected[1], file=expected[2])
        assert present() == expected
    assert root.handlers


def test_a_time_in_the_log_has_its_utc_offset() -> None:
    made = record("on", second=1_700_000_000)
    texts = (OneLine(FORMAT).format(made).split()[0], json.loads(JsonLine().format(made))["time"])
    for text in texts:
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.000[+-]\d\d:\d\d", text)
        assert datetime.fromisoformat(text).timestamp() == 1_700_000_000


def test_facts_of_a_process_are_in_every_line(root: logging.Logger) -> None:
    lines: list[str] = []
    start_logging(tell=lines.append, facts={"rank": 1})
    say(logging.getLogger("echo2d.learner"), logging.INFO, "trained", step=3)
    start_logging(tell=lines.append, as_json=True, facts={"rank": 1})
    logging.getLogger("echo2d.learner").info("on %d", 7)
    assert root.handlers
    assert lines[0].endswith("area=echo2d.learner rank=1 trained step=3")
    found = json.loads(lines[1])
    assert (found["rank"], found["message"]) == (1, "rank=1 on 7")


def test_a_full_log_file_makes_room_and_no_line_is_lost(tmp_path: Path) -> None:
    """Two processes log into one file; each of them may be the one that renames it."""
    path, line = tmp_path / "log", 100
    both = [LogFile(path, bytes_max=10 * line) for _ in range(2)]
    seen: list[str] = []
    for number in range(24):
        both[number % 3 % 2].emit(record(f"{number:0{line - 1}}"))
        seen = [
            text
            for file in (path.with_name("log.1"), path)
            if file.exists()
            for text in file.read_text().splitlines()
        ]
        assert [int(text) for text in seen] == list(range(number // 10 * 10 - 10, number + 1))[
            -len(seen) :
        ]
        assert len(seen) >= min(number + 1, 11)
    for each in both:
        each.close()
    assert len(seen) == 14
    assert path.stat().st_mode & 0o077 == 0
    assert sorted(file.name for file in tmp_path.iterdir()) == ["log", "log.1"]


def test_a_log_file_that_was_moved_away_is_created_again(tmp_path: Path) -> None:
    """So logrotate may do it, too."""
    path = tmp_path / "log"
    file = LogFile(path)
    file.emit(record("before"))
    path.rename(tmp_path / "old")
    file.emit(record("after"))
    file.close()
    assert ((tmp_path / "old").read_text(), path.read_text()) == ("before\n", "after\n")


def test_a_log_file_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    with pytest.raises(OperatorFault, match=r"--log-file: cannot write .*/nix/log: No such file"):
        LogFile(tmp_path / "nix" / "log")
