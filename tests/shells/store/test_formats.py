"""A file of another format is one line that says what to do, and stays as it is."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from echo2d.errors import OperatorFault
from echo2d.runtime.peer.state_dir import StateDir
from echo2d.runtime.run_dir.access_table import AccessTable
from echo2d.runtime.run_dir.run_directory import RunDirectory
from echo2d.store.ledger import Ledger, read_results
from echo2d.store.ledger_copy import copy_ledger
from echo2d.store.rentals import RentalStore

# What opens each file, and its name below the folder.
OPENERS: dict[str, Callable[[Path], object]] = {
    "ledger.sqlite": lambda folder: Ledger.open(folder / "ledger.sqlite").close(),
    "rentals.sqlite": lambda folder: RentalStore(folder / "rentals.sqlite").close(),
    "access.sqlite": lambda folder: AccessTable(RunDirectory(folder)),
}
ADVICE = {
    "ledger.sqlite": "finish the run with the echo2d that began it, or begin a new run",
    "rentals.sqlite": "echo2d rented --stop",
    "access.sqlite": "go on with the echo2d that wrote it",
}


def number(path: Path, to: int | None = None) -> int:
    """The format of a database, perhaps after it was set."""
    with closing(sqlite3.connect(path)) as connection:
        if to is not None:
            connection.execute(f"PRAGMA user_version = {to}")
        return int(connection.execute("PRAGMA user_version").fetchone()[0])


@pytest.mark.parametrize("name", OPENERS)
def test_a_newer_and_an_older_database_say_how_to_go_on(tmp_path: Path, name: str) -> None:
    open_it, path = OPENERS[name], tmp_path / name
    open_it(tmp_path)
    ours = number(path)
    assert ours > 0
    number(path, ours + 1)
    with pytest.raises(OperatorFault) as newer:
        open_it(tmp_path)
    assert f"{path} has format {ours + 1}, of a newer echo2d; this one reads format {ours}" in str(
        newer.value
    )
    assert number(path) == ours + 1, "it was touched"
    # An older number than the first exists only in the future.
    number(path, -1)
    with pytest.raises(OperatorFault, match=f"has format -1; this echo2d reads .*{ADVICE[name]}"):
        open_it(tmp_path)
    number(path, ours)
    open_it(tmp_path)


def test_a_ledger_that_a_start_brings_forward_says_so(tmp_path: Path) -> None:
    """Whoever only reads it leaves it as it is."""
    path = tmp_path / "ledger.sqlite"
    Ledger.open(path).close()
    number(path, 13)
    advice = f"ledger {path} has format 13; .*: start `echo2d coordinate` once, which brings it to"
    with pytest.raises(OperatorFault, match=advice):
        read_results(path)
    with pytest.raises(OperatorFault, match=advice):
        copy_ledger(path, tmp_path / "copy.sqlite")
    assert number(path) == 13


def test_an_access_table_from_before_it_had_a_number_goes_on(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    AccessTable(run).create("box", "worker")
    number(tmp_path / "access.sqlite", 0)
    assert [token.name for token in AccessTable(run).tokens()] == ["box"]
    assert number(tmp_path / "access.sqlite") == 1


def test_a_state_directory_of_a_newer_build_is_not_touched(tmp_path: Path) -> None:
    StateDir(tmp_path).close()
    (tmp_path / "format").write_text("2\n")
    for _ in range(2):
        with pytest.raises(OperatorFault) as newer:
            StateDir(tmp_path)
        assert str(newer.value).startswith(
            f"state directory {tmp_path} has format 2, of a newer echo2d; this one reads format 1"
        )


def test_a_state_directory_without_a_format_has_the_first(tmp_path: Path) -> None:
    StateDir(tmp_path).close()
    (tmp_path / "format").unlink()
    StateDir(tmp_path).close()
    assert (tmp_path / "format").read_text() == "1\n"


@pytest.mark.parametrize("text", ["", "one", "1.5"])
def test_a_damaged_format_is_said(tmp_path: Path, text: str) -> None:
    (tmp_path / "format").write_text(text)
    with pytest.raises(OperatorFault, match="format is damaged"):
        StateDir(tmp_path)
