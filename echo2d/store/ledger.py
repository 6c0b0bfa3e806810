"""Store what must survive `kill -9` of the coordinator: the ledger, one SQLite file (WAL,
synchronous=FULL).

    append     writes the records of one turn of the coordinator in one transaction
    recover    reads everything back after a restart; every page and row is checked (`row_sums`), and a damaged
               one is an OperatorFault, because resuming from it would break a promise; damaged measurements are
               forgotten instead
    trim       deletes a few of the groups that a checkpoint made superfluous, because deleting
               them all at once would delay commits; `recover` deletes the rest
    backfill   moves committed pages from the write-ahead log into the database, from any thread,
               so that no commit has to do it

These are deleted: a dropped group with its samples, leases, and attachments that no other prompt has;
the batches, commits and frozen groups of steps that the learner made durable (`CheckpointKept`); a session of
the Tinker API that is over, with its samplers, operations and saved steps; the body of an operation that the learner
will not compute again, and later the operation, when its client has had the result.
A revoked version that is published again is no longer revoked.

Blocking functions: one thread owns a Ledger from `open` to `close`. A lock on `<name>.lock` keeps
other processes out.
Not here: the tables, and the conversion between records and rows (`ledger_rows`).
"""

import fcntl
import logging
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Self
from urllib.parse import quote

from echo2d.core.base.canonical import digest_of
from echo2d.core.base.ids import Digest, Epoch, GroupId, PublishSeq
from echo2d.core.cluster.earned import WorkerEarned
from echo2d.core.cluster.events import VersionPublished
from echo2d.core.coordinator.events import CoordinatorRecord, EpochOpened, Recovered
from echo2d.core.protocol.trajectory import Attachment, StoredGroup, TrajectoryRecord
from echo2d.core.tinker.events import KeptClients
from echo2d.core.tinker.operations import ModelId
from echo2d.core.work.evaluation.events import Evaluated
from echo2d.errors import OperatorFault, PeerFault, StoreFault
from echo2d.store.disk import is_of_the_host, sqlite_words, store_faults
from echo2d.store.formats import require_format
from echo2d.store.ledger_rows import (
    ANSWERED,
    ATTACH,
    ATTACHED,
    COMMITTED,
    COUNTERS,
    DELIVERIES,
    EARNED,
    EPOCH_FLOOR,
    EVALUATED,
    FACTS,
    FORGET_DRAWN,
    FORGETTABLE,
    FROZEN,
    GIVEN,
    GIVEN_BACK,
    GROUPS,
    LEFT_OUT,
    LIMITS,
    MEANING,
    NEWEST_EPOCH,
    NEWEST_FORM,
    PUBLISH_FLOOR,
    PUBLISHED,
    RAISE,
    RATES,
    ROWS,
    SCHEMA,
    SCHEMA_VERSION,
    TASK_CURSORS,
    TINKER_CHECKPOINTS,
    TINKER_MODELS,
    TINKER_OPERATIONS,
    TINKER_SAMPLERS,
    TINKER_SESSIONS,
    TINKER_STEPS,
    TRAJECTORIES,
    TURNS,
    Query,
    Read,
    statements,
)
from echo2d.store.row_sums import Damage, TurnNumber, register

log = logging.getLogger("echo2d.store")

TRIM = """
DELETE FROM groups WHERE group_id IN (
    SELECT group_id FROM batches, json_each(groups) JOIN groups ON group_id = json_each.value
    WHERE step <= ? LIMIT ?)
"""
# Columns that identify a row in an error message.
KEYS = frozenset(
    {
        "name",
        "epoch",
        "publish_seq",
        "engine_class",
        "number",
        "group_id",
        "lease",
        "attempt",
        "sample",
        "turn",
        "step",
        "peer",
        "model",
        "path",
        "session",
        "sampler",
        "task",
        "cursor",
        "source_row",
    }
)
GO_ON = "restore the run directory from a backup, or begin a new run in another one"
TURNS_MAX = 1 << 62
TRIM_GROUPS_MAX = 16  # per call of `trim`, which commits wait for: a few milliseconds


@contextmanager
def ledger_faults(path: Path) -> Iterator[None]:
    """Turn an error of SQLite into a StoreFault."""
    try:
        yield
    except sqlite3.Error as error:
        raise StoreFault(f"ledger {path}: {sqlite_words(path, error)}") from error


class Ledger:
    """One open ledger. Not thread-safe."""

    def __init__(self, path: Path, connection: sqlite3.Connection, lock: IO[bytes] | None) -> None:
        self._path = path
        self._db = connection
        # None for a ledger in memory, which no other process and no crash can reach.
        self._lock = lock
        self._turn_file = None if lock is None else TurnNumber(path)
        # The number of the newest transaction.
        self._turn = self._read_turn()

    @staticmethod
    def open(path: Path) -> "Ledger":
        """Open or create the ledger. OperatorFault: it is in use, damaged, or of another version of
        echo2d.
        """
        with store_faults("opening", path):
            lock = path.with_name(path.name + ".lock").open("wb")
            # SQLite gives its -wal and -shm files the mode of the database.
            for file in (path, Path(lock.name)):
                file.touch()
                file.chmod(0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return Ledger(path, _connect(path), lock)
        except BlockingIOError as error:
            lock.close()
            raise OperatorFault(
                f"ledger {path} is in use: another coordinator runs on this directory"
            ) from error
        except BaseException:
            lock.close()
            raise

    @staticmethod
    def in_memory() -> "Ledger":
        """A new ledger that ends with this process: for simulations."""
        path = Path(":memory:")
        return Ledger(path, _connect(path), None)

    def close(self) -> None:
        self._db.close()
        if self._turn_file is not None:
            self._turn_file.close()
        if self._lock is not None:
            self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def append(self, records: Sequence[CoordinatorRecord]) -> None:
        """Write all records in order in one transaction. StoreFault: the disk refused, and none is
        written.
        """
        with self._transaction():
            for record in records:
                for statement, values in statements(record):
                    self._db.execute(statement, values)

    def attach(self, contents: Sequence[bytes]) -> None:
        """Keep the contents of a drawn prompt's attachments, each content once, by its digest."""
        with self._transaction():
            self._db.executemany(ATTACH, [(digest_of(each), each) for each in contents])

    def attachment(self, digest: Digest) -> bytes | None:
        """The content with this digest; None: no group and no drawn prompt has it."""
        with ledger_faults(self._path):
            row = self._row("SELECT content FROM attachments WHERE digest = ?", digest)
        return None if row is None else row[0]

    def operation_body(self, model: ModelId, number: int) -> bytes | None:
        """The body of a client's operation; None: it is unknown, or a step saved since then includes it."""
        with ledger_faults(self._path):
            row = self._row(
                "SELECT body FROM tinker_bodies WHERE model = ? AND number = ?", model, number
            )
        return None if row is None else row[0]

    def trim(self) -> bool:
        """Delete some of the groups that a checkpoint made superfluous. Returns whether there are
        more.
        """
        with self._transaction():
            (below,) = self._row("SELECT value FROM counters WHERE name = 'checkpoint'") or (0,)
            deleted = self._db.execute(TRIM, (below, TRIM_GROUPS_MAX))
            if deleted.rowcount == TRIM_GROUPS_MAX:
                return True
            self._db.execute("DELETE FROM batches WHERE step <= ?", (below,))
            self._db.execute("DELETE FROM commits WHERE step <= ?", (below,))
            return False

    def backfill(self) -> None:
        """Backfill the whole write-ahead log, while no transaction is open."""
        backfill(self._path)

    def recover(self) -> Recovered:
        """Read everything that is durable of this run. OperatorFault: a row is damaged, or transactions are missing."""
        with ledger_faults(self._path):
            try:
                self._check()
            except sqlite3.OperationalError:
                raise
            except sqlite3.DatabaseError as error:
                raise refusal(self._path, Damage(str(error))) from error
            counters = {each.name: each.value for each in self._read(COUNTERS)}
            # These rows are checked before `trim`, because the counters and the frozen batches decide
            # what it deletes.
            self._all(FROZEN)
            while self.trim():
                pass
            # Prompts that have no group yet are drawn again.
            with self._transaction():
                for statement in FORGET_DRAWN:
                    self._db.execute(statement)
            newest = next(self._read(NEWEST_EPOCH), EpochOpened(Epoch(0), 0))
            return Recovered(
                # A restored run skips the epochs that the original run may have used.
                epoch=Epoch(max(newest.epoch, counters.get(EPOCH_FLOOR, 0))),
                resume_step=newest.resume_step,
                learner=newest.learner,
                steps=newest.steps,
                trained=counters.get("trained", 0),
                dropped=counters.get("dropped", 0),
                facts=self._all(FACTS),
                publish_seq=PublishSeq(
                    max(
                        (self._row("SELECT max(publish_seq) FROM versions") or (0,))[0] or 0,
                        counters.get(PUBLISH_FLOOR, 0),
                    )
                ),
                published=self._all(PUBLISHED),
                next_group=GroupId(counters.get("group", 0)),
                groups=self._groups(),
                frozen=self._all(FROZEN),
                committed=self._all(COMMITTED),
                checkpoint=counters.get("checkpoint", 0),
                given=self._all(GIVEN),
                turns=self._all(TURNS),
                answered=self._all(ANSWERED),
                rates=self._all(RATES),
                deliveries=self._all(DELIVERIES),
                earned=self._all(EARNED),
                tasks=self._all(TASK_CURSORS),
                rows=self._all(ROWS),
                given_back=self._all(GIVEN_BACK),
                limits=self._all(LIMITS),
                evaluated=self._all(EVALUATED),
                clients=KeptClients(
                    models=self._all(TINKER_MODELS),
                    checkpoints=self._all(TINKER_CHECKPOINTS),
                    sessions=self._all(TINKER_SESSIONS),
                    samplers=self._all(TINKER_SAMPLERS),
                    operations=self._all(TINKER_OPERATIONS),
                    steps=self._all(TINKER_STEPS),
                ),
                form=next(self._read(NEWEST_FORM), None),
            )

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Run the block as one transaction."""
        with ledger_faults(self._path):
            self._db.execute("BEGIN IMMEDIATE")
            before = self._db.total_changes
            try:
                yield
                changed = self._db.total_changes > before
                if changed:
                    self._db.execute(RAISE, ("turn", self._turn + 1))
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
            if changed:
                self._turn += 1
                if self._turn_file is not None:
                    self._turn_file.write(self._turn)

    def _check(self) -> None:
        """OperatorFault: the file is damaged. Damaged measurements are forgotten instead."""
        forgotten = []
        for each in SCHEMA.damage(self._db):
            if each.table not in FORGETTABLE:
                raise refusal(self._path, each)
            log.warning("ledger %s: %s; this measurement is forgotten", self._path, each)
            forgotten.append(each)
        missing = 0 if self._turn_file is None else self._turn_file.read() - self._turn
        if self._turn_file is not None and missing > 0:
            raise OperatorFault(
                f"ledger {self._path} has lost its newest {missing} transactions: it is an older copy, or the -wal "
                f"file beside it is damaged or missing; {GO_ON}, or remove {self._turn_file.path.name} there to go on "
                "without them"
            )
        for each in forgotten:
            with self._transaction():
                self._db.execute(*each.delete())

    def _read_turn(self) -> int:
        """The number of the newest transaction; 0 if it cannot be read or is impossible, which `recover`
        reports.
        """
        try:
            (turn,) = self._row("SELECT value FROM counters WHERE name = 'turn'") or (0,)
        except sqlite3.Error:
            return 0
        return turn if isinstance(turn, int) and 0 <= turn < TURNS_MAX else 0

    def _row(self, query: str, *values: Any) -> tuple[Any, ...] | None:
        row: tuple[Any, ...] | None = self._db.execute(query, values).fetchone()
        return row

    def _all(self, query: Query[Read]) -> tuple[Read, ...]:
        return tuple(self._read(query))

    def _read(self, query: Query[Read]) -> Iterator[Read]:
        return _read(self._db, self._path, query)

    def _groups(self) -> tuple[StoredGroup, ...]:
        samples: dict[GroupId, list[TrajectoryRecord]] = {}
        for group, trajectory in self._read(TRAJECTORIES):
            samples.setdefault(group, []).append(trajectory)
        attached: dict[GroupId, list[Attachment]] = {}
        for number, attachment in self._read(ATTACHED):
            attached.setdefault(number, []).append(attachment)
        left_out: dict[GroupId, list[int]] = {}
        for each in self._read(LEFT_OUT):
            left_out.setdefault(each.group, []).append(each.sample)
        return tuple(
            _with(
                group,
                samples.get(group.record.group, ()),
                tuple(left_out.get(group.record.group, ())),
                tuple(attached.get(group.record.group, ())),
            )
            for group in self._read(GROUPS)
        )


def read_results(path: Path) -> tuple[tuple[VersionPublished, ...], tuple[Evaluated, ...]]:
    """Read the versions that are published and not revoked, by publish_seq, and all evaluations. A
    coordinator may have the ledger open meanwhile.

    OperatorFault: there is no ledger, it is of another format, or a row is damaged.
    """
    if not path.is_file():
        raise OperatorFault(f"{path.parent} is not the directory of a run: it has no {path.name}")
    with _reading(path) as connection:
        for table in (PUBLISHED.table, EVALUATED.table):
            for each in SCHEMA.damaged_rows(connection, table):
                raise refusal(path, each)
        return (
            tuple(_read(connection, path, PUBLISHED)),
            tuple(_read(connection, path, EVALUATED)),
        )


def read_earned(path: Path) -> tuple[WorkerEarned, ...]:
    """Read what workers have earned. A coordinator may have the ledger open. Empty if there is none.

    OperatorFault: the ledger is of another format, or a row is damaged.
    """
    if not path.is_file():
        return ()
    with _reading(path) as connection:
        for each in SCHEMA.damaged_rows(connection, EARNED.table):
            raise OperatorFault(
                f"ledger {path} is damaged: {each}; the coordinator forgets that row when it starts next"
            )
        return tuple(_read(connection, path, EARNED))


@contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection in a transaction, so that all reads see the same moment."""
    with ledger_faults(path), closing(connect_to_read(path)) as connection:
        connection.text_factory = readable
        check_format(connection, path)
        connection.execute("BEGIN")
        yield connection


def refusal(path: Path, found: Damage) -> OperatorFault:
    means = f": {MEANING[found.table]}" if found.table else ""
    return OperatorFault(f"ledger {path} is damaged: {found}{means}; {GO_ON}")


def connect_to_read(path: Path) -> sqlite3.Connection:
    """A connection that writes no rows.

    To read a write-ahead log, SQLite writes a file beside it, which not every reader may do. A ledger
    that no process has open has no log, and is read without that file.
    """
    wal = path.with_name(path.name + "-wal")
    writable = os.access(path.parent, os.W_OK) and os.access(path, os.W_OK)
    how = "" if writable or (wal.exists() and wal.stat().st_size) else "?immutable=1"
    connection = sqlite3.connect(f"file:{quote(str(path))}{how}", uri=True, isolation_level=None)
    connection.execute("PRAGMA query_only = ON")
    return connection


def _read(connection: sqlite3.Connection, path: Path, query: Query[Read]) -> Iterator[Read]:
    """Read rows and convert each of them. OperatorFault: a row is damaged."""
    rows = connection.execute(query.sql)
    for row in rows:
        try:
            yield query.make(row)
        except (PeerFault, ValueError, TypeError, RecursionError) as error:
            named = ((name, value) for (name, *_), value in zip(rows.description, row, strict=True))
            key = " ".join(f"{name}={value!r:.40}" for name, value in named if name in KEYS)
            raise OperatorFault(
                f"ledger {path}: row {key} of {query.table} is damaged: {error}; {GO_ON}"
            ) from error


def backfill(path: Path) -> int:
    """Move committed pages from the write-ahead log into the database, concurrently with commits.
    Returns the number of pages in the log.
    """
    with ledger_faults(path), closing(sqlite3.connect(path, isolation_level=None)) as connection:
        _, pages, _ = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        return int(pages)


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.text_factory = readable
    try:
        _prepare(connection, path)
    except (sqlite3.Error, UnicodeDecodeError) as error:
        connection.close()
        fault = StoreFault if is_of_the_host(error) else OperatorFault
        words = f"cannot open ledger {path}: {sqlite_words(path, error)}"
        raise fault(words if fault is StoreFault else f"{words}; {GO_ON}") from error
    except OperatorFault:
        connection.close()
        raise
    return connection


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA wal_autocheckpoint = 0")
    # Some builds of SQLite write zeros over all that is deleted: 1.2 s for 400 MB.
    connection.execute("PRAGMA secure_delete = FAST")
    connection.execute("PRAGMA foreign_keys = ON")
    register(connection)
    tables = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
    if not tables and connection.execute("PRAGMA user_version").fetchone()[0] == 0:
        connection.executescript(
            f"BEGIN; {SCHEMA.script} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
        )
    check_format(connection, path)


def check_format(connection: sqlite3.Connection, path: Path) -> None:
    """OperatorFault unless the ledger has our format."""
    found = connection.execute("PRAGMA user_version").fetchone()[0]
    older = "finish the run with the echo2d that began it, or begin a new run from its newest model"
    require_format(f"ledger {path}", found, SCHEMA_VERSION, older=older)


def readable(raw: bytes) -> str | bytes:
    """Decode text. A value that is not UTF-8 stays bytes, so that the check of its row refuses it."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


def _with(
    stored: StoredGroup,
    trajectories: Sequence[TrajectoryRecord],
    left_out: tuple[int, ...],
    attached: tuple[Attachment, ...],
) -> StoredGroup:
    record = replace(stored.record, trajectories=tuple(trajectories), left_out=left_out)
    return replace(stored, record=record, source=replace(stored.source, attachments=attached))
