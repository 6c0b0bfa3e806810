"""`echo2d top`: what keys do to the table, and a terminal of its own beside a real coordinator."""

import asyncio
import io
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from echo2d.cli import main
from echo2d.core.status.schema import Alert, Status
from echo2d.errors import OperatorFault
from echo2d.runtime.coordinator.main import core_machine
from echo2d.runtime.run_dir.run_directory import find_coordinator
from echo2d.views.top import SORT_BY, TopScreen, WorkerTable, keys_in, top
from tests.support.coordinator_world import World
from tests.support.polling import HANG_S
from tests.support.scripted_core import make_config, serving


def run_of(count: int) -> Status:
    """Workers box-00, box-01, ...; each higher one has accepted less and lags more."""
    world = World()
    for number in range(count):
        world.connect(f"box-{number:02}")
    status = world.state.status()
    workers = tuple(
        replace(worker, accepted=1000 - at, lag=at, usd_per_h=0.1)
        for at, worker in enumerate(status.workers)
    )
    return replace(status, workers=workers, alerts=())


def table_of(count: int) -> WorkerTable:
    table = WorkerTable()
    table.status = run_of(count)
    return table


def press(table: WorkerTable, *keys: str) -> WorkerTable:
    for key in keys:
        table.press(key)
    return table


def seen(table: WorkerTable, *, width: int = 150, height: int = 24) -> str:
    console = Console(file=io.StringIO(), width=width, height=height, highlight=False)
    console.print(table.picture(console, 12_345.0))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def names(table: WorkerTable) -> list[str]:
    return [worker.name for worker in table.shown()]


def test_bytes_of_a_terminal_become_keys() -> None:
    assert keys_in(b"\x1b[A\x1b[6~q/\r\x7f\x1b") == [
        "up",
        "page down",
        "q",
        "/",
        "enter",
        "backspace",
        "esc",
    ]
    assert keys_in(b"\xc3\xa9\x01x") == ["x"], "neither a key nor a character"


def test_workers_in_trouble_come_first_and_any_column_sorts() -> None:
    table = table_of(3)
    assert names(table) == ["box-02", "box-01", "box-00"], "the largest lag first"
    press(table, "right")
    assert (table.order, names(table)[0]) == ("worker", "box-00")
    press(table, "r")
    assert names(table)[0] == "box-02"
    press(table, "left", "left")
    assert table.order == "heard", "round the end"
    assert set(SORT_BY) >= {table.order for _ in range(20) if press(table, "right")}


def test_a_filter_is_typed_kept_and_left() -> None:
    table = press(table_of(12), *"/box-1")
    assert table.mode == "filter"
    assert names(table) == ["box-11", "box-10"]
    press(table, "backspace", "0", "x", "backspace", "enter")
    assert (table.mode, table.filter) == ("table", "box-0")
    assert "filter: box-0 (Esc: all)" in seen(table)
    assert len(names(press(table, "esc"))) == 12
    assert names(press(table, *"/q", "enter")) == [], "q is a letter while a filter is typed"
    assert not table.quits
    assert "box-" not in seen(table)
    assert names(press(table, *"/", "backspace", *"joined", "enter")) != [], "a state"


def test_the_chosen_worker_stays_chosen_when_the_order_changes() -> None:
    table = press(table_of(12), "down", "j", "up")
    assert table.selected is not None
    assert table.selected.name == "box-10"
    press(table, "right")
    assert table.selected.name == "box-10"
    press(table, "home", "up")
    assert table.selected.name == "box-00"
    press(table, "end", "down")
    assert table.selected.name == "box-11"


def test_one_worker_in_detail() -> None:
    table = table_of(3)
    assert table.status is not None
    peer = table.status.workers[-1].id
    alerts = (
        Alert("worker_stale", "box-02 is late", "box-02", peer),
        Alert("peer_refused", "its namesake lies", "box-02", "f" * 32),
        Alert("no_learner", "no learner"),
    )
    table.status = replace(table.status, alerts=alerts)
    text = seen(press(table, "enter"), height=70)
    for word in ("box-02", "usd_per_h", "0.1", "! box-02 is late", "Enter, Esc: back"):
        assert word in text
    assert "box-01" not in text
    # Both are at the head. Any peer may call itself so.
    assert (text.count("box-02 is late"), text.count("its namesake lies")) == (2, 1)
    assert "box-01" in seen(press(table, "down"), height=70)
    assert press(table, "esc").mode == "table"


@pytest.mark.parametrize("width", [60, 80, 150])
@pytest.mark.parametrize("height", [24, 50])
def test_it_fits_the_terminal_and_scrolls_to_the_chosen(width: int, height: int) -> None:
    table = table_of(60)
    assert table.status is not None
    alerts = tuple(Alert("worker_stale", f"box-{n} is late", f"box-{n}") for n in range(9))
    table.status = replace(table.status, alerts=alerts)
    for keys in ((), ("end",), ("page up",), ("home", *["down"] * 40)):
        text = seen(press(table, *keys), width=width, height=height)
        assert len(text.splitlines()) <= height
        assert table.selected is not None
        assert table.selected.name in text
    assert "and 5 more in `echo2d status`" in text


def test_without_a_terminal_it_says_so_in_one_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["top", "--run-dir", str(tmp_path)])
    assert (result.exit_code, len(result.output.splitlines())) == (2, 1)
    assert "`echo2d status --watch`" in result.output


class Terminal:
    """The other end of a pseudo terminal, whose text is kept."""

    def __init__(self) -> None:
        self.master, self.slave = os.openpty()
        os.set_blocking(self.master, False)
        self.text, self.file = "", os.fdopen(self.slave, "w", encoding="utf-8", closefd=False)
        self._more = asyncio.Event()

    def screen(self) -> TopScreen:
        console = Console(file=self.file, force_terminal=True, width=120, height=40)
        return TopScreen(console, self.slave)

    def read(self) -> None:
        self.text += os.read(self.master, 1 << 16).decode("utf-8", "replace")
        self._more.set()

    async def shows(self, words: str) -> None:
        """Waits until these words were drawn, then forgets all before."""
        async with asyncio.timeout(HANG_S):
            while words not in self.text:
                self._more.clear()
                await self._more.wait()
        self.text = ""

    def type(self, keys: bytes) -> None:
        os.write(self.master, keys)


@pytest.fixture
async def terminal() -> AsyncIterator[Terminal]:
    made = Terminal()
    asyncio.get_running_loop().add_reader(made.master, made.read)
    yield made
    asyncio.get_running_loop().remove_reader(made.master)
    made.file.close()
    os.close(made.master)
    os.close(made.slave)


async def test_on_a_terminal_beside_a_coordinator(tmp_path: Path, terminal: Terminal) -> None:
    config = make_config(tmp_path)
    find = partial(find_coordinator, config.run.run_dir)
    async with serving(config, core_machine), asyncio.TaskGroup() as tasks:
        showing = tasks.create_task(top(find, terminal.screen(), interval_s=0.05))
        await terminal.shows("no worker is here")
        terminal.type(b"/gpu")
        await terminal.shows("/gpu_")
        terminal.type(b"\r")
        await terminal.shows("filter: gpu")
        terminal.type(b"q")
        await showing
    await terminal.shows("\x1b[?1049l")  # what was there before is back


async def test_nobody_there_is_the_operators_mistake(tmp_path: Path, terminal: Terminal) -> None:
    with pytest.raises(OperatorFault, match="no coordinator runs in"):
        await top(partial(find_coordinator, tmp_path), terminal.screen(), interval_s=1.0)
