"""Changes rows of a ledger in such a way that their checksums do not show it."""

import sqlite3
from contextlib import closing
from pathlib import Path

from echo2d.store.ledger_rows import SCHEMA
from echo2d.store.row_sums import register


def change_rows(path: Path, statements: str) -> None:
    """Run these statements, and then compute all checksums again."""
    with closing(sqlite3.connect(path)) as database:
        register(database)
        database.executescript(statements)
        for table in SCHEMA._columns:
            database.execute(f"UPDATE {table} SET sum = {SCHEMA.sum_of(table)}")
        database.commit()
