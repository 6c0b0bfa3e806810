"""Sums of the ledger's rows: what the disk gives back is what was written, or it is named.

    SummedSchema    gives each table a column `sum`, and makes the parts of statements that keep it; `damage` reads
                    everything and says what does not fit: a page, the schema, or a row
    TableSum        one sum for all rows of some small tables of another file
    register        lets a connection write to such tables
    TurnNumber      how many transactions the ledger has, beside it

A sum is of the values of a row. That rows are neither missing nor there twice follows from the pages (SQLite's
integrity_check), and that no transaction is missing from the turn number.
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
    """A row that is not as it was written. key: the names and values of its primary key. Without a table: the file."""

    found: str
    table: str = ""
    key: tuple[tuple[str, _Value], ...] = ()

    def __str__(self) -> str:
        key = " ".join(f"{name}={value!r:.40}" for name, value in self.key)
        return f"row {key} of {self.table}: {self.found}" if self.table else self.found

    def delete(self) -> tuple[str, tuple[_Value, ...]]:
        """The statement that deletes the row, and its values."""
        where = " AND ".join(f"{name} = ?" for name, _ in self.key)
        # The names are our own, here and below.
        return f"DELETE FROM {self.table} WHERE {where}", tuple(value for _, value in self.key)  # noqa: S608


class SummedSchema:
    """A schema of which each row has a sum, in its last column.

    unsummed: columns, as `table.column`, that may change without it.
    """

    def __init__(self, schema: str, unsummed: Collection[str] = ()) -> None:
        # Of each table its columns but the sum, and those of its primary key.
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
        """The sum of a row, as an expression. changed: expressions that take the place of columns."""
        values = [changed.get(name, name) for name in self._summed(table)]
        return f"row_sum('{table}', {', '.join(values)})"

    def damage(self, connection: sqlite3.Connection) -> Iterator[Damage]:
        """What is not as it was written, as long as somebody asks.

        The connection gives text that is not UTF-8 as bytes.
        """
        for (found,) in connection.execute("PRAGMA integrity_check(1)"):
            if found != "ok":
                yield Damage(" ".join(str(found).split()))
        with closing(sqlite3.connect(":memory:")) as written:
            written.executescript(self.script)
            # Others may have added tables and triggers of their own.
            if _objects(written) - _objects(connection):
                yield Damage("its schema is not what was written")
                return
        for table in self._columns:
            yield from self.damaged_rows(connection, table)

    def damaged_rows(self, connection: sqlite3.Connection, table: str) -> Iterator[Damage]:
        """The rows of one table that are not as they were written."""
        names = self._summed(table)
        at = [names.index(name) for name in self._columns[table][1]]
        for *row, kept in connection.execute(f"SELECT {', '.join(names)}, sum FROM {table}"):  # noqa: S608
            if row_sum(table, *row) != kept:
                pairs = tuple((names[each], row[each]) for each in at)
                yield Damage("its values are not those that were written", table, pairs)

    def _summed(self, table: str) -> list[str]:
        """The columns that the sum is of."""
        names, _ = self._columns[table]
        return [name for name in names if f"{table}.{name}" not in self._unsummed]


class TableSum:
    """One sum over all rows of some small tables, in a table of its own, which is written with each change."""

    def __init__(self, version: int, tables: Collection[str]) -> None:
        """version: the format, as in `PRAGMA user_version`, from which on there is a sum."""
        self._version, self._tables = version, tables

    def write(self, database: sqlite3.Connection) -> None:
        database.execute(
            "CREATE TABLE IF NOT EXISTS sums (one INTEGER PRIMARY KEY, sum BLOB NOT NULL)"
        )
        database.execute("INSERT OR REPLACE INTO sums VALUES (1, ?)", (self._of(database),))

    def fits(self, database: sqlite3.Connection) -> bool:
        """Whether the rows are those that were written. Of a new file, or one of another format, they are."""
        is_new = not database.execute("SELECT 1 FROM sqlite_schema").fetchone()
        (found,) = database.execute("PRAGMA user_version").fetchone()
        if is_new or found not in (0, self._version):
            return True
        (pages,) = database.execute("PRAGMA integrity_check(1)").fetchone()
        kept = database.execute("SELECT sum FROM sums").fetchall()
        return pages == "ok" and kept == [(self._of(database),)]

    def _of(self, database: sqlite3.Connection) -> bytes:
        # The rows and not an index, which has some of their values once more. The names are our own.
        rows = {table: f"SELECT * FROM {table} NOT INDEXED" for table in self._tables}  # noqa: S608
        sums = [row_sum(table, *row) for table in rows for row in database.execute(rows[table])]
        return row_sum(b"".join(sorted(sums)))


class TurnNumber:
    """How many transactions a ledger has, in a file beside it: a ledger that has fewer has lost some.

    It is written after the transaction is durable, and not synced itself: after a loss of power it may say less.
    """

    def __init__(self, ledger: Path) -> None:
        self.path = ledger.with_name(ledger.name + ".turn")
        with store_faults("opening", self.path):
            self.path.touch(0o600)
            self._file = self.path.open("r+b", buffering=0)

    def read(self) -> int:
        """0: it is not known."""
        number, _, check = os.pread(self._file.fileno(), 64, 0).partition(b" ")
        with suppress(ValueError):
            if int(check, 16) == zlib.crc32(number):
                return int(number)
        return 0

    def write(self, number: int) -> None:
        text = b"%020d" % number
        # The transaction is durable, whatever becomes of its number.
        with suppress(OSError):
            os.pwrite(self._file.fileno(), text + b" %08x\n" % zlib.crc32(text), 0)

    def close(self) -> None:
        self._file.close()


def register(connection: sqlite3.Connection) -> None:
    """Statements call `row_sum`, which SQLite does not have."""
    connection.create_function("row_sum", -1, row_sum, deterministic=True)


def row_sum(*values: _Value) -> bytes:
    """Of the table's name and the values of a row, as SQLite keeps them: a whole number may become a float."""
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
