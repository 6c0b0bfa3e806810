"""A lack of a host's resources gives one line that says so, wherever it shows first."""

import errno
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from echo2d.cli import Faultless
from echo2d.config.tables import read_toml
from echo2d.errors import OperatorFault, StoreFault, of_the_host
from echo2d.net.security.auth import read_token_file
from echo2d.runtime.peer.state_dir import StateDir
from echo2d.runtime.process.lifecycle import outcome
from echo2d.runtime.run_dir.access_table import AccessTable
from echo2d.runtime.run_dir.run_directory import RunDirectory
from echo2d.store.disk import sqlite_words
from echo2d.store.ledger import Ledger, ledger_faults
from tests.support.descriptors import no_descriptor_left
from tests.support.full_disk import files_up_to


def test_an_error_that_is_not_of_the_host_stays_a_bug() -> None:
    assert of_the_host(OSError(errno.ENOENT, "No such file or directory", "x")) is None


def test_a_file_that_a_user_named_is_the_users_fault_unless_the_host_lacks_something(
    tmp_path: Path,
) -> None:
    """Exit code 2 is not started again by systemd, and 1 is."""
    with pytest.raises(OperatorFault, match=r"there is no token file"):
        read_token_file(tmp_path / "box.token")
    (tmp_path / "box.token").write_text("{}")
    with no_descriptor_left(), pytest.raises(StoreFault, match="raise LimitNOFILE"):
        read_token_file(tmp_path / "box.token")
    with no_descriptor_left(), pytest.raises(StoreFault, match="raise LimitNOFILE"):
        read_toml(tmp_path / "box.token")


def test_an_unnamed_error_that_ends_a_daemon_gives_one_line() -> None:
    error = OSError(errno.EROFS, "Read-only file system", "/run/x")
    with pytest.raises(StoreFault, match="/run/x: Read-only file system: a disk of this"):
        outcome(ExceptionGroup("tasks", [ExceptionGroup("more", [error]), ValueError("later")]))
    assert outcome(ExceptionGroup("tasks", [OSError(errno.ENOENT, "gone")])) == 1


def test_an_unnamed_error_of_a_command_gives_one_line() -> None:
    @click.group(cls=Faultless)
    def program() -> None: ...

    @program.command()
    def write() -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/x")

    found = CliRunner().invoke(program, ["write"])
    line = "echo2d: /x: No space left on device: a disk of this host is full: make room\n"
    assert (found.exit_code, found.output) == (1, line)


def test_a_lack_of_descriptors_is_not_reported_as_a_fault_of_the_ledger(
    tmp_path: Path,
) -> None:
    with (
        pytest.raises(StoreFault, match="may open no more files: raise LimitNOFILE"),
        no_descriptor_left(),
        ledger_faults(tmp_path),
    ):
        sqlite3.connect(tmp_path / "x").execute("PRAGMA user_version")


OPENED: dict[str, Callable[[Path], Ledger | AccessTable | StateDir]] = {
    "ledger": lambda path: Ledger.open(path / "ledger.sqlite"),
    "access table": lambda path: AccessTable(RunDirectory(path)),
    "state directory": lambda path: StateDir(path / "state"),
}


@pytest.mark.parametrize("opened", OPENED)
def test_the_service_retries_a_start_on_a_full_disk(tmp_path: Path, opened: str) -> None:
    """Exit code 2 would end the service for good, also when there is room again."""
    RunDirectory(tmp_path)
    with files_up_to(0), pytest.raises(StoreFault):
        OPENED[opened](tmp_path)
    again = OPENED[opened](tmp_path)
    if not isinstance(again, AccessTable):
        again.close()


def test_a_file_with_tables_but_no_format_is_not_taken_for_a_ledger(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    Ledger.open(path).close()
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA user_version = 0")
    with pytest.raises(OperatorFault, match="has format 0; this echo2d reads format"):
        Ledger.open(path)


def test_the_error_of_a_database_without_room_says_to_make_room(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "a.sqlite")) as database:
        database.execute("PRAGMA max_page_count = 1")
        with pytest.raises(sqlite3.OperationalError) as full:
            database.execute("CREATE TABLE a (b)")
    assert sqlite_words(tmp_path / "a.sqlite", full.value).endswith("is full: make room")
