"""Store the boxes that a run has rented, and its rent clock, in one SQLite file that survives `kill
-9`.

A row is written before the start command of its box is sent, so no box is ever forgotten; rows are
never deleted. A checksum shows whether the disk returns what was written. The functions block and may
be called from any thread: if a task is cancelled during a write, its clean-up closes the file from
another thread. The ledger's lock keeps other coordinators out.
"""

import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, fields
from pathlib import Path

from echo2d.core.renting.budget import Moment, Rental
from echo2d.errors import OperatorFault, StoreFault
from echo2d.store.formats import require_format
from echo2d.store.row_sums import TableSum

_SCHEMA_VERSION = 3
_SCHEMA = """
CREATE TABLE rentals (
    label TEXT PRIMARY KEY, provider TEXT NOT NULL, offer TEXT NOT NULL, usd_per_h REAL NOT NULL,
    billed_by_s REAL NOT NULL, sent_at REAL NOT NULL, life_s REAL NOT NULL, grace_s REAL NOT NULL,
    copies INTEGER NOT NULL, gone_at REAL, seen INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE clock (one INTEGER PRIMARY KEY, at REAL NOT NULL, boot TEXT NOT NULL,
    since_boot_s REAL NOT NULL,
    unix_s REAL NOT NULL);
"""
_SUM = TableSum(_SCHEMA_VERSION, ("rentals", "clock"))
_COLUMNS = ", ".join(each.name for each in fields(Rental))
_MARKS = ", ".join("?" for _ in fields(Rental))
# All names in these statements are our own.
_INSERT = f"INSERT OR REPLACE INTO rentals ({_COLUMNS}) VALUES ({_MARKS})"  # noqa: S608
_SELECT = f"SELECT {_COLUMNS} FROM rentals ORDER BY sent_at"  # noqa: S608


class RentalStore:
    """One open file."""

    def __init__(self, path: Path) -> None:
        """Open or create the file. OperatorFault: it is damaged or of another format."""
        self._path = path
        self._turn = threading.Lock()
        try:
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            found = self._db.execute("PRAGMA user_version").fetchone()[0]
            if found == 0:
                self._db.executescript(f"BEGIN; {_SCHEMA}")
                _SUM.write(self._db)
                self._db.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
                self._db.execute("COMMIT")
            is_whole = _SUM.fits(self._db)
        except sqlite3.Error as error:
            raise OperatorFault(f"cannot open {path}: {error}") from error
        require_format(
            str(path),
            found or _SCHEMA_VERSION,
            _SCHEMA_VERSION,
            older="give all boxes back with the echo2d that rented them (`echo2d rented --stop`), then "
            "move the file away",
        )
        if not is_whole:
            raise OperatorFault(
                f"{path} is damaged: its rows are not those that were written; restore it from a copy, or give all "
                "boxes of this run back at the provider, then move the file away"
            )
        path.chmod(0o600)

    def close(self) -> None:
        with self._turn:
            self._db.close()

    def keep(self, rentals: Sequence[Rental], at: float, moment: Moment) -> None:
        """Write these rows, replacing those with the same labels, and the rent clock, in one
        transaction.
        """
        with self._turn, self._faults():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                self._db.executemany(_INSERT, [astuple(rental) for rental in rentals])
                clock = (at, moment.boot, moment.since_boot_s, moment.unix_s)
                self._db.execute("INSERT OR REPLACE INTO clock VALUES (0, ?, ?, ?, ?)", clock)
                _SUM.write(self._db)
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def rentals(self) -> tuple[Rental, ...]:
        """All boxes that the run has ever rented."""
        with self._turn, self._faults():
            return tuple(Rental(*row) for row in self._db.execute(_SELECT))

    def clock(self) -> tuple[float, Moment] | None:
        """The last saved time of the rent clock, and the moment of saving; None in a new run."""
        with self._turn, self._faults():
            row = self._db.execute("SELECT at, boot, since_boot_s, unix_s FROM clock").fetchone()
        return None if row is None else (row[0], Moment(*row[1:]))

    @contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise StoreFault(f"{self._path}: {error}") from error
