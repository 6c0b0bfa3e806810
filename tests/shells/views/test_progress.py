"""The line at the bottom of a terminal, and log lines above it."""

import io
import re

from rich.console import Console

from echo2d.views.progress import progress_line


def test_the_progress_line_is_shown_and_log_lines_stay_whole() -> None:
    terminal = io.StringIO()
    console = Console(file=terminal, force_terminal=True, width=40, color_system=None)
    long = f"reason=[bold]{'x' * 100}"
    with progress_line(console) as line:
        assert line is not None
        line.show("receiving version 0: 3.1/16.1 GB 48 MB/s eta 4:31", 0.19)
        line.print(long)
        line.show("serving", None)
    assert f"{long}\n" in terminal.getvalue()
    rows = (
        re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue()).replace("\r", "\n").split("\n")
    )
    shown = [row for row in rows if "19%" in row]
    # Once at `show`, once below the log line, and never wrapped.
    assert shown == ["█████░░░░░░░░░░░░░░░░░░░  19%  receivin…"] * 2


def test_a_terminal_keeps_its_cursor() -> None:
    """A worker that is killed cannot put it back."""
    terminal = io.StringIO()
    with progress_line(Console(file=terminal, force_terminal=True)) as line:
        assert line is not None
        assert terminal.getvalue().endswith("\x1b[?25h")


def test_no_progress_line_is_shown_without_a_terminal() -> None:
    with progress_line(Console(file=io.StringIO())) as line:
        assert line is None
