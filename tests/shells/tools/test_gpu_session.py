"""The session on a GPU keeps what was measured, whatever happens to a section. Its sections here need no torch."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.gpu.session import passed, read_rows, run_process, table

LIMIT_S = 60.0


def python(script: str) -> list[str]:
    return [sys.executable, "-c", script]


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("print('fine')", ""),
        ("raise MemoryError('out of memory')", "MemoryError: out of memory"),
        ("import sys; sys.exit(3)", "exit code 3"),
        ("import os; os.kill(os.getpid(), 9)", "killed by SIGKILL"),
    ],
)
def test_a_section_that_fails_says_why(script: str, error: str, tmp_path: Path) -> None:
    assert run_process(python(script), tmp_path / "log", LIMIT_S) == error


def test_a_section_that_hangs_ends_at_its_limit_with_all_that_it_started(tmp_path: Path) -> None:
    """The reader of a pipe reaches its end when the last process that could write has ended."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    hang = f"import signal; pipe = open({str(pipe)!r}, 'w'); signal.pause()"
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {hang!r}])"
    assert run_process(python(script), tmp_path / "log", 1.0) == "ended at its limit of 1 s"
    os.set_blocking(reader, True)
    assert os.read(reader, 1) == b""
    os.close(reader)


def row(what: str, **figures: Any) -> dict[str, Any]:
    return {"what": what, "figures": figures, "asked": {}, "skipped": ""}


def test_rows_count_that_were_written_before_a_section_died(tmp_path: Path) -> None:
    """The last row of a name counts, and a line that was cut off does not."""
    path = tmp_path / "B.rows"
    lines = [{"card": "H100"}, row("one", ms=1.0), row("two", ms=2.0), row("one", ms=3.0)]
    path.write_text("\n".join([*map(json.dumps, lines), '{"what": "three", "fig']))
    assert read_rows(path) == ({"card": "H100"}, [row("one", ms=3.0), row("two", ms=2.0)])
    path.write_text("")
    assert read_rows(path) == ({}, [])


def session_with(mfu: float, error: str = "") -> dict[str, Any]:
    measured = {**row("layers", MFU=mfu), "asked": {"MFU": ["at least", 0.42]}}
    skipped = {**row("copies"), "skipped": "there is no GPU"}
    section = {"title": "steps", "seconds": 12.3, "rows": [measured, skipped], "error": error}
    return {"card": "H100", "date": "today", "small": False, "sections": {"B": section}}


def test_the_table_has_a_line_for_each_row_and_each_failure() -> None:
    lines = table(session_with(0.4, error="out of memory")).splitlines()
    assert lines[-3:] == [
        "| B, steps (12 s) | layers | MFU: 0.4 | MFU at least 0.42: **not held** |",
        "|  | copies | not measured: there is no GPU |  |",
        "|  | **failed** | out of memory | |",
    ]


def test_a_session_passes_if_no_section_failed_and_figures_are_as_asked() -> None:
    assert passed(session_with(0.43))
    assert not passed(session_with(0.41))
    assert not passed(session_with(0.43, error="killed by SIGKILL"))
