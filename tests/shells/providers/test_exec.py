"""The operator's commands as processes, and the book of rented boxes."""

import contextlib
import json
import sqlite3
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from echo2d.core.renting.budget import Label, Moment, Rental
from echo2d.core.renting.events import Instance
from echo2d.errors import OperatorFault, ProviderFault, StoreFault
from echo2d.providers import exec as exec_module
from echo2d.providers.base import BoxOrder
from echo2d.providers.exec import Commands, ExecProvider, read_instance, run_command
from echo2d.store.rentals import RentalStore
from tests.support.polling import HANG_S

PATH = {"PATH": "/usr/bin:/bin"}
RENTAL = Rental(Label("x-a-b-1"), "a", "b", 0.5, 60.0, 10.0, 3600.0, 600.0)


def shell(script: str) -> tuple[str, ...]:
    return ("sh", "-c", script)


def runs(pid_file: Path) -> bool:
    try:
        stat = Path(f"/proc/{pid_file.read_text().strip()}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


async def test_start_and_stop_get_their_arguments_in_the_environment(tmp_path: Path) -> None:
    told = tmp_path / "told"
    commands = Commands(shell(f"env > {told}"), shell(f"env >> {told}"), shell(""), 20.0, PATH)
    provider = ExecProvider(commands, "x-")
    await provider.start(BoxOrder(Label("x-a-b-1"), "b", "https://h:1", Path("t.token"), 90.5))
    await provider.stop(Label("x-a-b-1"), ("i-1", "i-2"))
    lines = told.read_text().splitlines()
    for line in (
        "LABEL=x-a-b-1",
        "LABEL_PREFIX=x-",
        "OFFER=b",
        "COORDINATOR_URL=https://h:1",
        "TOKEN_FILE=t.token",
    ):
        assert f"ECHO2D_{line}" in lines
    assert "ECHO2D_LIFE_S=90" in lines
    assert "ECHO2D_ID=i-1 i-2" in lines


async def test_a_list_is_read_whole_or_not_at_all() -> None:
    good = [{"label": "x-a-b-1", "id": "i-1", "state": "running"}, {"label": None, "id": "i-2"}]
    printed = "\\n".join(json.dumps(each).replace('"', '\\"') for each in good)
    provider = ExecProvider(Commands((), (), shell(f'printf "{printed}\\n\\n"'), 20.0, PATH), "x-")
    assert await provider.list() == (Instance(Label("x-a-b-1"), "i-1"),)
    for line in (
        "no json",
        "[]",
        '{"label": "x-1"}',
        '{"label": "x-1", "id": "a b"}',
        '{"label": "x-1", "id": 7}',
    ):
        with pytest.raises(ProviderFault):
            read_instance(line)


async def test_the_last_output_of_a_failed_command_is_reported() -> None:
    with pytest.raises(ProviderFault, match="ended with 3: no capacity"):
        await run_command(shell("echo no capacity >&2; exit 3"), PATH, timeout_s=HANG_S)
    with pytest.raises(ProviderFault):
        await run_command(("/no/such/command",), PATH, timeout_s=HANG_S)


async def test_a_command_that_hangs_is_killed_with_its_group(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    with pytest.raises(ProviderFault, match="took longer"):
        await run_command(shell(f"sleep 600 & echo $! > {pid}; wait"), PATH, timeout_s=0.5)
    deadline = time.monotonic() + HANG_S
    while runs(pid):
        assert time.monotonic() < deadline


async def test_processes_that_a_command_leaves_running_keep_no_caller_waiting(
    tmp_path: Path,
) -> None:
    """Although that holds its output open; and it stays."""
    pid = tmp_path / "pid"
    assert (
        await run_command(shell(f"sleep 600 & echo $! > {pid}; echo made"), PATH, timeout_s=HANG_S)
        == "made\n"
    )
    assert runs(pid)
    await run_command(("kill", pid.read_text().strip()), PATH, timeout_s=HANG_S)


async def test_the_output_of_a_command_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exec_module, "_OUTPUT_BYTES_MAX", 1000)
    with pytest.raises(ProviderFault, match="more than 1000 bytes"):
        await run_command(shell("head -c 300000 /dev/zero"), PATH, timeout_s=HANG_S)


async def test_a_command_that_prints_without_end_is_killed() -> None:
    """It would keep the event loop busy for all of its time."""
    begun = time.monotonic()
    with pytest.raises(ProviderFault, match="printed more than"):
        await run_command(("yes",), PATH, timeout_s=60.0)
    with pytest.raises(ProviderFault, match="printed more than"):
        await run_command(shell("yes >&2"), PATH, timeout_s=60.0)
    assert time.monotonic() < begun + 30


def test_the_book_of_boxes_survives_its_process(tmp_path: Path) -> None:
    path, moment = tmp_path / "rentals.sqlite", Moment("boot", 5.0, 1e9)
    store = RentalStore(path)
    assert (store.rentals(), store.clock()) == ((), None)
    gone = replace(RENTAL, copies=2, gone_at=99.0)
    store.keep([RENTAL, replace(RENTAL, label=Label("x-a-b-2"), sent_at=11.0)], 11.0, moment)
    store.keep([gone], 99.0, moment)  # not closed: as after kill -9
    again = RentalStore(path)
    assert again.rentals() == (gone, replace(RENTAL, label=Label("x-a-b-2"), sent_at=11.0))
    assert again.clock() == (99.0, moment)
    assert path.stat().st_mode & 0o777 == 0o600
    store.close()
    again.close()


def test_the_book_can_be_closed_while_another_thread_writes_a_row(tmp_path: Path) -> None:
    """As when a coordinator is told to stop in that moment: it ended with a segmentation fault."""
    moment = Moment("boot", 5.0, 1e9)
    for number in range(8):
        store = RentalStore(tmp_path / f"{number}.sqlite")
        begun = threading.Event()

        def write(store: RentalStore = store, begun: threading.Event = begun) -> None:
            with contextlib.suppress(StoreFault):
                while True:
                    store.keep([RENTAL], 0.0, moment)
                    begun.set()

        writer = threading.Thread(target=write)
        writer.start()
        begun.wait()
        store.close()
        writer.join()


@pytest.mark.parametrize(
    "change",
    ["UPDATE rentals SET usd_per_h = 2", "UPDATE clock SET at = 9", "DELETE FROM rentals"],
)
def test_damaged_rows_of_the_book_are_refused(tmp_path: Path, change: str) -> None:
    path = tmp_path / "rentals.sqlite"
    store = RentalStore(path)
    store.keep([RENTAL], 0.0, Moment("boot", 5.0, 1e9))
    store.close()
    with sqlite3.connect(path) as database:
        database.execute(change)
    database.close()
    with pytest.raises(OperatorFault, match="is damaged: its rows"):
        RentalStore(path)


def test_a_file_that_is_no_book_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "rentals.sqlite"
    path.write_bytes(b"nonsense" * 100)
    with pytest.raises(OperatorFault, match="cannot open"):
        RentalStore(path)
