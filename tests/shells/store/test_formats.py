"""A file of another format gives one line that says what to do, and is not changed."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from echo2d.errors import OperatorFault
from echo2d.runtime.peer.state_dir import StateDir
from echo2d.runtime.run_dir.access_table import AccessTable
from echo2d.runtime.run_dir.run_directory import RunDirectory
from echo2d.store.ledger import Ledger
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
def test_the_error_about_a_newer_or_older_database_says_how_to_go_on(
    tmp_path: Path, name: str
) -> None:
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


def test_a_state_directory_of_a_newer_build_is_not_changed(tmp_path: Path) -> None:
    StateDir(tmp_path).close()
    (tmp_path / "format").write_text("3\n")
    for _ in range(2):
        with pytest.raises(OperatorFault) as newer:
            StateDir(tmp_path)
        assert str(newer.value).startswith(
            f"state directory {tmp_path} has format 3, of a newer echo2d; this one reads format 2"
        )


@pytest.mark.parametrize("text", ["", "one", "1.5"])
def test_a_damaged_format_number_is_reported(tmp_path: Path, text: str) -> None:
    (tmp_path / "format").write_text(text)
    with pytest.raises(OperatorFault, match="format is damaged"):
        StateDir(tmp_path)
