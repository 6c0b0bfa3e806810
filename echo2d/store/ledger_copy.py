"""Copies a ledger while its coordinator writes to it, and marks a copy as restored.

A copy shows one moment: it is read in one read transaction, which delays no commit of the
coordinator. Meanwhile the coordinator's write-ahead log cannot be emptied, so it grows by the commits
made during the copy.

A restored run must never be mistaken for the run that it was copied from. That run may have opened
sessions and published versions after the copy: its learner knows a newer epoch, and its workers
refuse publishes older than those that they know. So the epochs and publish numbers of a restored ledger
continue far above those of that run.
"""

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from echo2d.errors import OperatorFault
from echo2d.store.disk import allocate, sync
from echo2d.store.ledger import check_format, connect_to_read, ledger_faults, readable, refusal
from echo2d.store.ledger_rows import EPOCH_FLOOR, PUBLISH_FLOOR, RAISE, SCHEMA
from echo2d.store.row_sums import register

# A run opens fewer sessions and publishes fewer versions than this between a backup and its loss.
SKIPPED = 1 << 20


@dataclass(frozen=True, slots=True)
class LedgerFacts:
    """What a ledger says about its run."""

    checkpoint: int  # the learner may have to resume at this step
    committed: int  # the last committed step
    newest: int  # the last frozen or committed step; a learner can resume at it or below
    versions: dict[str, bytes]  # path -> digest, for published versions that are not revoked


def copy_ledger(source: Path, target: Path) -> LedgerFacts:
    """Copy the ledger at `source` to the new file `target`, durably. A coordinator may run.

    OperatorFault: it is of another format, or damaged. StoreFault: it cannot be read, or the disk is full.
    """
    copy_database(source, target)
    with ledger_faults(target), closing(sqlite3.connect(target)) as connection:
        check_format(connection, source)
        connection.text_factory = readable
        for found in SCHEMA.damage(connection):
            raise refusal(source, found)
        return _facts(connection)


def copy_database(source: Path, target: Path) -> None:
    """Copy an SQLite file, as of one moment, to a new private file. StoreFault: it cannot be done."""
    with ledger_faults(source), closing(connect_to_read(source)) as connection:
        allocate(target, 0)
        with closing(sqlite3.connect(target)) as copy:
            connection.backup(copy)
            # The copy is one file, without a log beside it.
            copy.execute("PRAGMA journal_mode = DELETE")
            (found,) = copy.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        raise OperatorFault(f"{source} is damaged: {found}")
    sync(target)


def mark_restored(path: Path, *, age_s: float) -> None:
    """Raise the ledger's epoch and publish number above all that its run may have used since the copy.

    age_s: the age of the copy. It is added, so that a second restore of the same backup gets higher numbers
    than the first.
    """
    with ledger_faults(path), closing(sqlite3.connect(path, isolation_level=None)) as connection:
        check_format(connection, path)
        register(connection)
        connection.execute("BEGIN IMMEDIATE")
        for floor, table, column in (
            (EPOCH_FLOOR, "epochs", "epoch"),
            (PUBLISH_FLOOR, "versions", "publish_seq"),
        ):
            # The names are our own.
            (used,) = connection.execute(f"SELECT max({column}) FROM {table}").fetchone()  # noqa: S608
            known = connection.execute("SELECT value FROM counters WHERE name = ?", (floor,))
            (before,) = known.fetchone() or (0,)
            value = max(used or 0, before) + SKIPPED + max(0, int(age_s))
            connection.execute(RAISE, (floor, value))
        connection.execute("COMMIT")
    sync(path)


def _facts(connection: sqlite3.Connection) -> LedgerFacts:
    (checkpoint,) = connection.execute(
        "SELECT coalesce(max(value), 0) FROM counters WHERE name = 'checkpoint'"
    ).fetchone()
    (committed,) = connection.execute("SELECT coalesce(max(step), 0) FROM commits").fetchone()
    (frozen,) = connection.execute("SELECT coalesce(max(step), 0) FROM batches").fetchone()
    paths = connection.execute(
        "SELECT path, digest FROM versions WHERE NOT revoked ORDER BY publish_seq"
    )
    committed = max(committed, checkpoint)
    return LedgerFacts(checkpoint, committed, max(committed, frozen), dict(paths))
