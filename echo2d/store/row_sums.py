"""Checksums of the ledger's rows. They show whether the disk returns what was written, and which rows differ.

    SummedSchema    gives each table a column `sum`, and makes the parts of statements that write it; `damage` reads
                    everything and reports what is damaged: a page, the schema, or a row
    TableSum        one sum for all rows of some small tables of another file
    register        lets a connection write to such tables
    TurnNumber      how many transactions the ledger has, in a file beside it

A sum covers the values of one row. A missing or doubled row shows in the pages (SQLite's integrity_check), and a
missing transaction in the turn number.
Not here: whether values make sense (`ledger_rows`).
"""

import os
import sqlite3
import struct
import zlib
from collections.abc import Collection, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from echo2d.store.disk import store_faults

_Value = int | float | str | bytes | None


@dataclass(frozen=True, slots=True)
class Damage:
    """A damaged row, or a damaged file."""

    found: str  # what is wrong
    table: str = ""  # empty: the file is damaged
    key: tuple[tuple[str, _Value], ...] = ()  # names and values of the row's primary key

    def __str__(self) -> str:
        key = " ".join(f"{name}={value!r:.40}" for name, value in self.key)
        return f"row {key} of {self.table}: {self.found}" if self.table else self.found

    def delete(self) -> tuple[str, tuple[_Value, ...]]:
        """The statement that deletes the row, and its values."""
        where = " AND ".join(f"{name} = ?" for name, _ in self.key)
        # All names in statements are our own, here and below.
        return f"DELETE FROM {self.table} WHERE {where}", tuple(value for _, value in self.key)  # noqa: S608


class SummedSchema:
    """A schema in which each row has a sum, in its last column.

    unsummed: columns, as `table.column`, that the sum does not cover.
    """

    def __init__(self, schema: str, unsummed: Collection[str] = ()) -> None:
        # For each table: its columns without the sum, and the columns of its primary key.
        self._columns: dict[str, tuple[list[str], list[str]]] = {}
        self._unsummed = unsummed
        with closing(sqlite3.connect(":memory:")) as database:
            database.executescript(schema)
            tables = database.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")
            for (table,) in tables.fetchall():
                found = database.execute(f"PRAGMA table_info({table})").fetchall()
                key = [name for _, name, *_, place in found if place]
                self._columns[table] = [name for _, name, *_ in found], key
        more = [f"ALTER TABLE {table} ADD COLUMN sum BLOB;\n" for table in self._columns]
        self.script = "".join([schema, *more])

    def insert(self, table: str, how: str = "INSERT") -> str:
        """The statement that inserts a row, given all its values."""
        names, _ = self._columns[table]
        marks = {name: f"?{place}" for place, name in enumerate(names, 1)}
        return f"{how} INTO {table} VALUES ({', '.join(marks.values())}, {self.sum_of(table, **marks)})"

    def sum_of(self, table: str, **changed: str) -> str:
        """An SQL expression for the sum of a row. changed: expressions in place of the columns' values."""
        values = [changed.get(name, name) for name in self._summed(table)]
        return f"row_sum('{table}', {', '.join(values)})"

    def damage(self, connection: sqlite3.Connection) -> Iterator[Damage]:
        """Yield every damage; the caller may stop early.

        The connection returns text that is not UTF-8 as bytes.
        """
        for (found,) in connection.execute("PRAGMA integrity_check(1)"):
            if found != "ok":
                yield Damage(" ".join(str(found).split()))
        with closing(sqlite3.connect(":memory:")) as written:
            written.executescript(self.script)
            # Other programs may have added their own tables and triggers.
            if _objects(written) - _objects(connection):
                yield Damage("its schema is not what was written")
                return
        for table in self._columns:
            yield from self.damaged_rows(connection, table)

    def damaged_rows(self, connection: sqlite3.Connection, table: str) -> Iterator[Damage]:
        """The damaged rows of one table."""
        names = self._summed(table)
        at = [names.index(name) for name in self._columns[table][1]]
        for *row, kept in connection.execute(f"SELECT {', '.join(names)}, sum FROM {table}"):  # noqa: S608
            if row_sum(table, *row) != kept:
                pairs = tuple((names[each], row[each]) for each in at)
                yield Damage("its values are not those that were written", table, pairs)

    def _summed(self, table: str) -> list[str]:
        """The columns that the sum covers."""
        names, _ = self._columns[table]
        return [name for name in names if f"{table}.{name}" not in self._unsummed]


class TableSum:
    """One sum over all rows of some small tables. It has its own table, and is written with each change."""

    def __init__(self, version: int, tables: Collection[str]) -> None:
        """version: the format, as in `PRAGMA user_version`, whose files have a sum."""
        self._version, self._tables = version, tables

    def write(self, database: sqlite3.Connection) -> None:
        database.execute(
            "CREATE TABLE IF NOT EXISTS sums (one INTEGER PRIMARY KEY, sum BLOB NOT NULL)"
        )
        database.execute("INSERT OR REPLACE INTO sums VALUES (1, ?)", (self._of(database),))

    def fits(self, database: sqlite3.Connection) -> bool:
        """Whether the rows are those that were written. True for a new file, and for one of another format."""
        is_new = not database.execute("SELECT 1 FROM sqlite_schema").fetchone()
        (found,) = database.execute("PRAGMA user_version").fetchone()
        if is_new or found not in (0, self._version):
            return True
        (pages,) = database.execute("PRAGMA integrity_check(1)").fetchone()
        kept = database.execute("SELECT sum FROM sums").fetchall()
        return pages == "ok" and kept == [(self._of(database),)]

    def _of(self, database: sqlite3.Connection) -> bytes:
        # Read the rows and not an index, which has copies of some values. The names are our own.
        rows = {table: f"SELECT * FROM {table} NOT INDEXED" for table in self._tables}  # noqa: S608
        sums = [row_sum(table, *row) for table in rows for row in database.execute(rows[table])]
        return row_sum(b"".join(sorted(sums)))


class TurnNumber:
    """How many transactions a ledger has, in a file beside it: a ledger that has fewer has lost some.

    It is written after the transaction is durable, and not synced: after a power failure it may be too low.
    """

    def __init__(self, ledger: Path) -> None:
        self.path = ledger.with_name(ledger.name + ".turn")
        with store_faults("opening", self.path):
            self.path.touch(0o600)
            self._file = self.path.open("r+b", buffering=0)

    def read(self) -> int:
        """The number; 0: not known."""
        number, _, check = os.pread(self._file.fileno(), 64, 0).partition(b" ")
        with suppress(ValueError):
            if int(check, 16) == zlib.crc32(number):
                return int(number)
        return 0

    def write(self, number: int) -> None:
        text = b"%020d" % number
        # The transaction is durable, even if its number cannot be written.
        with suppress(OSError):
            os.pwrite(self._file.fileno(), text + b" %08x\n" % zlib.crc32(text), 0)

    def close(self) -> None:
        self._file.close()


def register(connection: sqlite3.Connection) -> None:
    """Add the function `row_sum`, which the statements call, to a connection."""
    connection.create_function("row_sum", -1, row_sum, deterministic=True)


def row_sum(*values: _Value) -> bytes:
    """The sum of a table's name and a row's values. A whole number, which SQLite may return as a float, has the
    sum of that float.
    """
    parts = []
    for value in values:
        match value:
            case None:
                parts.append(b"n")
            case int():
                parts.append(b"i%d" % value)
            case float() if value.is_integer():
                parts.append(b"i%d" % int(value))
            case float():
                parts.append(b"f" + struct.pack("<d", value))
            case str():
                encoded = value.encode()
                parts.append(b"t%d:" % len(encoded) + encoded)
            case bytes():
                parts.append(b"b%d:" % len(value) + value)
    return blake3(b"".join(parts)).digest(8)


def _objects(database: sqlite3.Connection) -> set[tuple[str | bytes | None, ...]]:
    return set(database.execute("SELECT type, name, tbl_name, sql FROM sqlite_schema"))
