"""One fact, one line."""

import logging

import pytest

from echo2d.runtime.logs import FORMAT, OneLine


@pytest.mark.parametrize("text", ["a\nlevel=INFO forged", "\x1b[2J", "\u202eabc", "\ud800"])
def test_what_others_wrote_stays_on_its_line(text: str) -> None:
    record = logging.LogRecord("echo2d.x", logging.INFO, "", 0, "peer name=%s", (text,), None)
    line = OneLine(FORMAT).format(record)
    assert line.isprintable()
    assert "peer name=" in line


def test_ordinary_lines_are_as_they_were() -> None:
    record = logging.LogRecord("echo2d.x", logging.INFO, "", 0, "name=%s", ("größe",), None)
    assert OneLine("%(message)s").format(record) == "name=größe"
