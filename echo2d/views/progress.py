"""A line at the bottom of a terminal that shows what a program does, with a bar. Log lines scroll above it. The line is
shown only if stderr is a terminal.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.text import Text

from echo2d.views.status import bar


class ProgressLine:
    """Shows the bottom line, and prints other lines above it."""

    def __init__(self, live: Live) -> None:
        self._live = live

    def show(self, words: str, share: float | None) -> None:
        """Show these words. share: how much of the work is done; None: it is not known, so no bar is shown."""
        line = Text(words, no_wrap=True, overflow="ellipsis")
        if share is not None:
            line = Text.assemble((bar(share, 1.0), "cyan"), f" {share:4.0%}  ", line)
            line.no_wrap, line.overflow = True, "ellipsis"
        self._live.update(line, refresh=True)

    def print(self, text: str) -> None:
        """Print the text above the line, without cutting it."""
        self._live.console.print(Text(text), soft_wrap=True)


@contextmanager
def progress_line(console: Console | None = None) -> Iterator[ProgressLine | None]:
    """Show the line until the block ends. Yields None if stderr is no terminal."""
    console = console or Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield None
        return
    live = Live(
        console=console,
        auto_refresh=False,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    with live:
        # The cursor stays visible, so that a killed process leaves the terminal usable.
        console.show_cursor(show=True)
        yield ProgressLine(live)
