"""One line at the bottom of a terminal that says what a program does, with a bar; log lines scroll by
above it. There is none where stderr is no terminal.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.text import Text

from echo2d.views.status import bar


class ProgressLine:
    """Shows one line, and prints others above it."""

    def __init__(self, live: Live) -> None:
        self._live = live

    def show(self, words: str, share: float | None) -> None:
        """share: how much of it is done; None: not known."""
        line = Text(words, no_wrap=True, overflow="ellipsis")
        if share is not None:
            line = Text.assemble((bar(share, 1.0), "cyan"), f" {share:4.0%}  ", line)
            line.no_wrap, line.overflow = True, "ellipsis"
        self._live.update(line, refresh=True)

    def print(self, text: str) -> None:
        """Print it as it is, however long it is."""
        self._live.console.print(Text(text), soft_wrap=True)


@contextmanager
def progress_line(console: Console | None = None) -> Iterator[ProgressLine | None]:
    """The line, until the block ends; None: stderr is no terminal."""
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
        # A process that is killed leaves the terminal as it was.
        console.show_cursor(show=True)
        yield ProgressLine(live)
