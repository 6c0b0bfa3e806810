"""`echo2d top`: the workers of a run in a table that a person sorts, filters and looks into by keys.

    table --/--> filter --Enter or Esc--> table
      +--Enter--> one worker --Enter or Esc--> table

It watches like `echo2d status --watch` (`views/watch.py`) and draws with the same pieces
(`views/status.py`). `WorkerTable` is what is shown, `TopScreen` the terminal.
"""

import asyncio
import os
import signal
import termios
import tty
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, Literal, Self

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from echo2d.core.status.schema import OwnStatus, Status, WorkerStatus
from echo2d.errors import Fault, OperatorFault, first_fault
from echo2d.views.status import (
    WIDE_COLUMNS,
    alert_line,
    columns_of,
    main_numbers,
    table_of,
    trouble,
)
from echo2d.views.watch import Find, Screen, watch

# In `TROUBLE` those in trouble come first; the other orders are columns of the table.
TROUBLE = "trouble"
# Alerts above the table; the others are counted. All are in `echo2d status`.
ALERTS_SHOWN = 4
# Below this width there are two numbers in a row, and only the columns that matter most.
NARROW_COLUMNS = 90
NARROW = ("worker", "state", "lag", "per h", "heard")
# Lines of the table besides its workers: the header and its rule.
TABLE_LINES = 2
FILTER_CHARS_MAX = 64

KEYS: Mapping[bytes, str] = {
    b"\x1b[A": "up",
    b"\x1b[B": "down",
    b"\x1b[D": "left",
    b"\x1b[C": "right",
    b"\x1b[5~": "page up",
    b"\x1b[6~": "page down",
    b"\x1b[H": "home",
    b"\x1b[F": "end",
    b"\x1b": "esc",
    b"\r": "enter",
    b"\n": "enter",
    b"\x7f": "backspace",
    b"\x08": "backspace",
    b"\x03": "q",
}
HELP: Mapping[str, str] = {
    "table": "up, down: choose   Enter: look into it   left, right: sort by   r: other way round   "
    "/: filter   q: quit",
    "filter": "part of a name, an id or a state   Enter: keep it   Esc: show all",
    "worker": "Enter, Esc: back   up, down: the next one   q: quit",
}

SORT_BY: Mapping[str, Callable[[WorkerStatus], Any]] = {
    TROUBLE: trouble,
    "worker": lambda worker: worker.name,
    "state": lambda worker: worker.state,
    "serves": lambda worker: -1 if worker.serving is None else worker.serving.version,
    "lag": lambda worker: -1 if worker.lag is None else worker.lag,
    "running": lambda worker: worker.running,
    "leases": lambda worker: worker.leases,
    "accepted": lambda worker: worker.accepted,
    "per h": lambda worker: worker.mu or 0.0,
    "used": lambda worker: worker.used,
    "reward": lambda worker: worker.reward or 0.0,
    "tokens": lambda worker: worker.answer_tokens or 0.0,
    "audit": lambda worker: worker.flagged,
    "usd/h": lambda worker: worker.usd_per_h,
    "usd": lambda worker: worker.cost_usd,
    "refit": lambda worker: worker.refit_pause_s or 0.0,
    "heard": lambda worker: worker.silent_s,
}


def keys_in(data: bytes) -> list[str]:
    """The keys that a terminal sent; characters stand for themselves, others are left out."""
    found = []
    while data:
        known = max((code for code in KEYS if data.startswith(code)), key=len, default=b"")
        if known:
            found.append(KEYS[known])
        elif data[:1].decode("ascii", "ignore").isprintable():
            found.append(data[:1].decode("ascii", "ignore"))
        data = data[len(known) or 1 :]
    return [key for key in found if key]


class WorkerTable:
    """What a person has chosen to see, and the picture of it."""

    def __init__(self) -> None:
        self.status: Status | None = None
        self.mode: Literal["table", "filter", "worker"] = "table"
        self.order = TROUBLE
        self.reverse = False
        self.filter = ""
        self.quits = False
        self._selected: str | None = None
        self._page = 1

    # --- keys

    def press(self, key: str) -> None:
        """Do what a key says; a key that means nothing here is ignored."""
        if self.mode == "filter":
            self._type(key)
        elif key == "q":
            self.quits = True
        elif key in ("up", "k", "down", "j", "page up", "page down", "home", "end"):
            self._move(key)
        elif self.mode == "worker":
            self.mode = "table" if key in ("enter", "esc") else "worker"
        else:
            self._press_in_table(key)

    def _press_in_table(self, key: str) -> None:
        orders = [TROUBLE, *([] if self.status is None else columns_of(self.status, wide=True))]
        match key:
            case "enter":
                self.mode = "worker" if self.selected is not None else "table"
            case "/":
                self.mode = "filter"
            case "esc":
                self.filter = ""
            case "r":
                self.reverse = not self.reverse
            case "left" | "<" | "right" | ">":
                step = 1 if key in ("right", ">") else -1
                self.order = orders[(orders.index(self.order) + step) % len(orders)]
            case _:
                pass

    def _type(self, key: str) -> None:
        match key:
            case "enter":
                self.mode = "table"
            case "esc":
                self.mode, self.filter = "table", ""
            case "backspace":
                self.filter = self.filter[:-1]
            case _ if len(key) == 1:
                self.filter = (self.filter + key)[:FILTER_CHARS_MAX]

    def _move(self, key: str) -> None:
        shown = self.shown()
        if not shown:
            return
        steps = {
            "up": -1,
            "k": -1,
            "down": 1,
            "j": 1,
            "page up": -self._page,
            "page down": self._page,
        }
        at = self._place(shown)
        to = {"home": 0, "end": len(shown) - 1}.get(key, at + steps.get(key, 0))
        self._selected = shown[max(0, min(len(shown) - 1, to))].id

    # --- what is shown

    def shown(self) -> list[WorkerStatus]:
        """The workers that pass the filter, in order."""
        workers = [] if self.status is None else self.status.workers
        found = [
            worker
            for worker in workers
            if any(self.filter in text for text in (worker.name, worker.id, worker.state))
        ]
        return sorted(found, key=SORT_BY[self.order], reverse=self.reverse)

    @property
    def selected(self) -> WorkerStatus | None:
        shown = self.shown()
        return shown[self._place(shown)] if shown else None

    def _place(self, shown: list[WorkerStatus]) -> int:
        """Where the selected worker is; the first one if it is not shown."""
        ids = [worker.id for worker in shown]
        return ids.index(self._selected) if self._selected in ids else 0

    def picture(
        self, console: Console, tokens_per_s: float | None, away: Text | None = None
    ) -> RenderableType:
        assert self.status is not None
        status, narrow = self.status, console.width < NARROW_COLUMNS
        columns = columns_of(status, wide=console.width >= WIDE_COLUMNS)
        columns = [name for name in columns if name in NARROW] if narrow else columns
        head: list[RenderableType] = [
            *([] if away is None else [away]),
            main_numbers(status, tokens_per_s, tiles_per_row=2 if narrow else 4),
            *map(alert_line, status.attention[:ALERTS_SHOWN]),
        ]
        if more := len(status.attention) - ALERTS_SHOWN:
            head += [Text(f"    and {more} more in `echo2d status`", style="dim")] * (more > 0)
        foot = Text(self._foot(), style="dim", no_wrap=True, overflow="ellipsis")
        room = console.height - len(console.render_lines(Group(*head, foot)))
        body = self._worker(status) if self.mode == "worker" else self._table(status, room, columns)
        return Group(*head, body, foot)

    def _foot(self) -> str:
        if self.mode == "filter":
            return f"/{self.filter}_   {HELP['filter']}"
        kept = f"filter: {self.filter} (Esc: all)   " if self.filter else ""
        return kept + HELP[self.mode]

    def _table(self, status: Status, room: int, columns: list[str]) -> RenderableType:
        shown, rows = self.shown(), max(1, room - TABLE_LINES)
        self._page = rows
        at = self._place(shown)
        first = max(0, min(at - rows // 2, len(shown) - rows))
        return table_of(
            status,
            shown[first : first + rows],
            columns,
            marked=self.order,
            selected=shown[at] if shown else None,
        )

    def _worker(self, status: Status) -> RenderableType:
        worker = self.selected
        if worker is None:
            return Text("  it is not here any more")
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim")
        table.add_column()
        table.add_row("  worker", Text(worker.name, style="bold"))
        for each in fields(worker):
            if each.name != "name":
                table.add_row(f"  {each.name}", Text(_words(getattr(worker, each.name))))
        about = [alert.sentence for alert in status.alerts if alert.peer == worker.id]
        return Group(table, *map(alert_line, about))


def _words(value: Any) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    version = getattr(value, "version", None)
    return str(value) if version is None else f"version {version}, {value.digest[:12]}"


class TopScreen(Screen):
    """The terminal: draws the table anew for each answer and each key. terminal: its descriptor."""

    def __init__(self, console: Console, terminal: int) -> None:
        super().__init__(as_json=False, console=console, full_screen=True)
        self.table = WorkerTable()
        self.left = asyncio.Event()
        self._terminal = terminal
        self._drawn: tuple[float | None, Text | None] = (None, None)

    def __enter__(self) -> Self:
        self._before = termios.tcgetattr(self._terminal)
        tty.setcbreak(self._terminal)
        # Another description of the terminal: only reading keys must not block, drawing may.
        self._keys = os.open(os.ttyname(self._terminal), os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        loop = asyncio.get_running_loop()
        loop.add_reader(self._keys, self._read)
        loop.add_signal_handler(signal.SIGWINCH, self._redraw)
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        loop = asyncio.get_running_loop()
        loop.remove_signal_handler(signal.SIGWINCH)
        loop.remove_reader(self._keys)
        os.close(self._keys)
        termios.tcsetattr(self._terminal, termios.TCSADRAIN, self._before)

    def draw(
        self, status: Status | OwnStatus, tokens_per_s: float | None, away: Text | None = None
    ) -> None:
        if isinstance(status, OwnStatus):
            raise OperatorFault(
                "a worker's token shows its own boxes only: use `echo2d status`, or a viewer's token"
            )
        self.table.status, self._drawn = status, (tokens_per_s, away)
        self._redraw()

    def _redraw(self) -> None:
        if self.table.status is not None:
            self._live.update(self.table.picture(self._console, *self._drawn), refresh=True)

    def _read(self) -> None:
        for key in keys_in(os.read(self._keys, 256)):
            self.table.press(key)
        if self.table.quits:
            self.left.set()
        else:
            self._redraw()


async def top(find: Find, screen: TopScreen, *, interval_s: float) -> None:
    """Show the workers until the person quits. Faults are those of `watch`."""
    fault: Fault | None = None
    try:
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(watch(find, screen, interval_s=interval_s))
            leaving = tasks.create_task(screen.left.wait())
            await asyncio.wait({watching, leaving}, return_when=asyncio.FIRST_COMPLETED)
            watching.cancel()
            leaving.cancel()
    except* Fault as faults:
        fault = first_fault(faults)
    if fault is not None:
        raise fault


def terminal_screen() -> TopScreen:
    """The screen of this process's terminal. OperatorFault: there is none."""
    console = Console(highlight=False)
    if not (console.is_terminal and os.isatty(0)):
        raise OperatorFault(
            "top needs a terminal; `echo2d status --watch` prints into a file or pipe as well"
        )
    return TopScreen(console, 0)
