"""Store what must survive `kill -9` of the coordinator: the ledger, one SQLite file (WAL,
synchronous=FULL).

    append     writes the records of one turn of the coordinator in one transaction
    recover    reads everything back after a restart; every row is checked, and a damaged one is an
               OperatorFault, because resuming from it would break a promise
    trim       deletes a few of the groups that a checkpoint made superfluous, because deleting
               them all at once would delay commits; `recover` deletes the rest
    backfill   moves committed pages from the write-ahead log into the database, from any thread,
               so that no commit has to do it

Deleted are: a dropped group with its samples and leases; the batches, commits and frozen groups of
steps that the learner made durable (`CheckpointKept`). Counters never go back. Publishing a revoked
version again makes it live again. A reward of NaN is stored as NULL, which means not scored yet.

Blocking functions: one thread owns a Ledger from `open` to `close`. A lock on `<name>.lock` keeps
other processes out.
"""

import fcntl
import json
import math
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, Self, TypeVar

from echo2d.core.base.codec import pack, plain_reader, unpacker
from echo2d.core.base.ids import Epoch, GroupId, PublishSeq
from echo2d.core.broadcast.events import FormChosen, RatesMeasured
from echo2d.core.cluster.events import VersionPublished, VersionRevoked
from echo2d.core.coordinator.events import CheckpointKept, CoordinatorRecord, EpochOpened, Recovered
from echo2d.core.protocol.control_messages import VersionSpan
from echo2d.core.protocol.trajectory import (
    GROUP_BYTES_MAX,
    GroupRecord,
    Partial,
    StoredGroup,
    TrajectoryRecord,
    unpack_logprobs,
    unpack_tokens,
)
from echo2d.core.rollouts.events import (
    AcceptedResult,
    BatchCommitted,
    BatchFrozen,
    GroupDropped,
    LeaseGiven,
    PromptTaken,
    SampleKept,
    SampleRewarded,
)
from echo2d.core.topology.uplink_rates import UPLINK_MIN, PeerRate
from echo2d.errors import OperatorFault, PeerFault, StoreFault

SCHEMA_VERSION = 4
TRIM = """
DELETE FROM groups WHERE group_id IN (
    SELECT group_id FROM batches, json_each(groups) JOIN groups ON group_id = json_each.value
    WHERE step <= ? LIMIT ?)
"""
# Columns that identify a row in an error message.
KEYS = frozenset(
    {"name", "epoch", "publish_seq", "group_id", "lease", "attempt", "sample", "step", "peer"}
)
TRIM_GROUPS_MAX = 16  # per call of `trim`, which commits wait for: a few milliseconds
SCHEMA = """
CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE epochs (epoch INTEGER PRIMARY KEY, resume_step INTEGER NOT NULL);
CREATE TABLE versions (
    publish_seq INTEGER PRIMARY KEY, epoch INTEGER NOT NULL, version INTEGER NOT NULL,
    digest BLOB NOT NULL,
    path TEXT NOT NULL, full_bytes INTEGER NOT NULL, revoked INTEGER NOT NULL DEFAULT 0);
CREATE TABLE forms (publish_seq INTEGER PRIMARY KEY, base BLOB, frame_bytes INTEGER NOT NULL);
CREATE TABLE groups (group_id INTEGER PRIMARY KEY, cursor INTEGER NOT NULL, prompt BLOB NOT NULL);
CREATE TABLE leases (
    group_id INTEGER NOT NULL REFERENCES groups ON DELETE CASCADE, lease INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    worker TEXT NOT NULL, samples TEXT NOT NULL, version INTEGER NOT NULL, digest BLOB NOT NULL,
    base BLOB,
    PRIMARY KEY (group_id, lease, attempt));
CREATE TABLE samples (
    group_id INTEGER NOT NULL REFERENCES groups ON DELETE CASCADE, sample INTEGER NOT NULL,
    lease INTEGER NOT NULL,
    attempt INTEGER NOT NULL, worker TEXT NOT NULL, tokens BLOB NOT NULL, logprobs BLOB NOT NULL,
    spans BLOB NOT NULL,
    fingerprint BLOB NOT NULL, reward REAL, PRIMARY KEY (group_id, sample));
CREATE TABLE batches (step INTEGER PRIMARY KEY, digest BLOB NOT NULL, groups TEXT NOT NULL,
    refusals INTEGER NOT NULL);
CREATE TABLE commits (
    step INTEGER, epoch INTEGER, digest BLOB NOT NULL, t_train_s REAL NOT NULL,
    PRIMARY KEY (step, epoch)) WITHOUT ROWID;
CREATE TABLE rates (peer TEXT PRIMARY KEY, bytes_per_s REAL NOT NULL, held_up INTEGER NOT NULL);
"""


@dataclass(frozen=True, slots=True)
class _Spans:
    """The stored form of a sample's spans."""

    spans: tuple[VersionSpan, ...]


@dataclass(frozen=True, slots=True)
class _Counter:
    """A counter that never goes back, whatever rows have been deleted."""

    name: Literal["cursor", "group", "checkpoint"]
    value: int


_Row = tuple[Any, ...]
_Read = TypeVar("_Read")

_unpack_spans = unpacker(_Spans, bytes_max=GROUP_BYTES_MAX)
_unpack_partial = unpacker(Partial, bytes_max=GROUP_BYTES_MAX)


@contextmanager
def _store_faults(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise StoreFault(f"ledger {path}: {error}") from error


class Ledger:
    """One open ledger. Not thread-safe."""

    def __init__(self, path: Path, connection: sqlite3.Connection, lock: IO[bytes]) -> None:
        self._path = path
        self._db = connection
        self._lock = lock

    @staticmethod
    def open(path: Path) -> "Ledger":
        """Open or create the ledger. OperatorFault: it is in use, damaged, or of another version of
        echo2d.
        """
        lock = path.with_name(path.name + ".lock").open("wb")
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

    def close(self) -> None:
        self._db.close()
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def append(self, records: Sequence[CoordinatorRecord]) -> None:
        """Write all records in order in one transaction. StoreFault: the disk refused, and none is
        written.
        """
        with self._transaction():
            for record in records:
                for statement, values in _STATEMENTS[type(record)](record):
                    self._db.execute(statement, values)

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
        """Read everything that is durable of this run. OperatorFault: a row is damaged."""
        with _store_faults(self._path):
            counters = {each.name: each.value for each in self._counters()}
            # Checks these rows before `trim`, which deletes what the counters and frozen batches
            # say.
            self._frozen()
            while self.trim():
                pass
            newest = self._newest_epoch()
            return Recovered(
                epoch=newest.epoch,
                resume_step=newest.resume_step,
                publish_seq=PublishSeq(
                    (self._row("SELECT max(publish_seq) FROM versions") or (0,))[0] or 0
                ),
                published=self._published(),
                next_cursor=counters.get("cursor", 0),
                next_group=GroupId(counters.get("group", 0)),
                groups=self._groups(),
                frozen=self._frozen(),
                committed=self._committed(),
                checkpoint=counters.get("checkpoint", 0),
                given=self._given(),
                answered=self._answered(),
                rates=self._rates(),
                form=self._form(),
            )

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Run the block as one transaction."""
        with _store_faults(self._path):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def _row(self, query: str) -> tuple[Any, ...] | None:
        row: tuple[Any, ...] | None = self._db.execute(query).fetchone()
        return row

    def _read(self, table: str, query: str, make: Callable[[_Row], _Read]) -> Iterator[_Read]:
        """Read rows and convert each by `make`. OperatorFault: `make` refused one."""
        rows = self._db.execute(query)
        for row in rows:
            try:
                yield make(row)
            except (PeerFault, ValueError, TypeError, RecursionError) as error:
                named = (
                    (name, value) for (name, *_), value in zip(rows.description, row, strict=True)
                )
                key = " ".join(f"{name}={value!r:.40}" for name, value in named if name in KEYS)
                raise OperatorFault(
                    f"ledger {self._path}: row {key} of {table} is damaged: {error}; "
                    "restore the run directory from a copy, or begin a new run in another one"
                ) from error

    def _counters(self) -> tuple[_Counter, ...]:
        return tuple(self._read("counters", "SELECT name, value FROM counters", _counter))

    def _newest_epoch(self) -> EpochOpened:
        query = "SELECT epoch, resume_step FROM epochs ORDER BY epoch DESC LIMIT 1"
        return next(self._read("epochs", query, _epoch), EpochOpened(Epoch(0), 0))

    def _published(self) -> tuple[VersionPublished, ...]:
        query = (
            "SELECT publish_seq, epoch, version, digest, path, full_bytes FROM versions "
            "WHERE NOT revoked "
            "ORDER BY publish_seq"
        )
        return tuple(self._read("versions", query, _version))

    def _form(self) -> FormChosen | None:
        query = "SELECT publish_seq, base, frame_bytes FROM forms ORDER BY publish_seq DESC LIMIT 1"
        return next(self._read("forms", query, _form), None)

    def _groups(self) -> tuple[StoredGroup, ...]:
        samples: dict[GroupId, list[TrajectoryRecord]] = {}
        query = (
            "SELECT group_id, sample, tokens, logprobs, spans, reward, worker FROM samples"
            " ORDER BY group_id, sample"
        )
        for group, trajectory in self._read("samples", query, _trajectory):
            samples.setdefault(group, []).append(trajectory)
        stored = self._read(
            "groups", "SELECT group_id, cursor, prompt FROM groups ORDER BY group_id", _group
        )
        return tuple(_with(group, samples.get(group.record.group, ())) for group in stored)

    def _given(self) -> tuple[LeaseGiven, ...]:
        query = (
            "SELECT group_id, lease, attempt, worker, samples, version, digest, base "
            "FROM leases ORDER BY rowid"
        )
        return tuple(self._read("leases", query, _lease))

    def _answered(self) -> tuple[AcceptedResult, ...]:
        query = "SELECT lease, attempt, sample, fingerprint FROM samples ORDER BY rowid"
        return tuple(self._read("samples", query, _answer))

    def _rates(self) -> tuple[PeerRate, ...]:
        query = "SELECT peer, bytes_per_s, held_up FROM rates ORDER BY rowid"
        return tuple(self._read("rates", query, _rate))

    def _frozen(self) -> tuple[BatchFrozen, ...]:
        return tuple(
            self._read(
                "batches",
                "SELECT step, digest, groups, refusals FROM batches ORDER BY step",
                _batch,
            )
        )

    def _committed(self) -> tuple[BatchCommitted, ...]:
        query = (
            "SELECT step, max(epoch) AS epoch, digest, t_train_s FROM commits "
            "GROUP BY step ORDER BY step"
        )
        return tuple(self._read("commits", query, _commit))


def backfill(path: Path) -> int:
    """Move committed pages from the write-ahead log into the database, concurrently with commits.
    Returns the number of pages in the log.
    """
    with _store_faults(path), closing(sqlite3.connect(path, isolation_level=None)) as connection:
        _, pages, _ = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        return int(pages)


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.text_factory = _text
    try:
        _prepare(connection, path)
    except sqlite3.Error as error:
        connection.close()
        raise OperatorFault(f"cannot open ledger {path}: {error}") from error
    except OperatorFault:
        connection.close()
        raise
    return connection


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA wal_autocheckpoint = 0")
    connection.execute("PRAGMA foreign_keys = ON")
    found = connection.execute("PRAGMA user_version").fetchone()[0]
    if found == 0:
        connection.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
    elif found != SCHEMA_VERSION:
        raise OperatorFault(
            f"ledger {path} has format {found}; this echo2d reads format {SCHEMA_VERSION}"
        )


def _text(raw: bytes) -> str | bytes:
    """Decode text; what is not UTF-8 stays bytes, so that the check of the row refuses it."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


# --- rows -> records; PeerFault, ValueError, TypeError and RecursionError mean a damaged row

_counter = plain_reader(_Counter)
_epoch = plain_reader(EpochOpened)
_version = plain_reader(VersionPublished)
_form = plain_reader(FormChosen)
_commit = plain_reader(BatchCommitted)
_checked_group = plain_reader(StoredGroup)
_checked_record = plain_reader(GroupRecord)
_checked_lease = plain_reader(LeaseGiven)
_checked_answer = plain_reader(AcceptedResult)
_checked_batch = plain_reader(BatchFrozen)
_checked_rate = plain_reader(PeerRate)


def _group(row: _Row) -> StoredGroup:
    """A stored group without its trajectories, which are read from other rows."""
    group, cursor, prompt = row
    stored: StoredGroup = _checked_group([[group, prompt, []], cursor])
    unpack_tokens(stored.record.prompt)
    return stored


def _trajectory(row: _Row) -> tuple[GroupId, TrajectoryRecord]:
    group, sample, tokens, logprobs, spans, reward, worker = row
    scored = math.nan if reward is None else reward
    checked: GroupRecord = _checked_record(
        [group, b"", [[sample, tokens, logprobs, [], scored, worker]]]
    )
    (kept,) = checked.trajectories
    return checked.group, replace(kept, spans=_spans(_unpack_spans(spans).spans, tokens, logprobs))


def _lease(row: _Row) -> LeaseGiven:
    group, lease, attempt, worker, samples, version, digest, packed = row
    given: LeaseGiven = _checked_lease(
        [group, lease, attempt, worker, json.loads(samples), [version, digest], [b"", b"", []]]
    )
    if packed is None:
        return given
    base: Partial = _unpack_partial(packed)
    _spans(base.spans, base.tokens, base.logprobs)
    return replace(given, base=base)


def _with(stored: StoredGroup, trajectories: Sequence[TrajectoryRecord]) -> StoredGroup:
    return replace(stored, record=replace(stored.record, trajectories=tuple(trajectories)))


def _spans(
    spans: tuple[VersionSpan, ...], tokens: bytes, logprobs: bytes
) -> tuple[VersionSpan, ...]:
    """Return the spans. PeerFault: there are none, or tokens and logprobs differ in number."""
    if not spans or len(unpack_tokens(tokens)) != len(unpack_logprobs(logprobs)):
        raise PeerFault("its tokens, logprobs and spans do not fit together")
    return spans


def _answer(row: _Row) -> AcceptedResult:
    lease, attempt, sample, fingerprint = row
    answered: AcceptedResult = _checked_answer([[lease, attempt], sample, fingerprint])
    return answered


def _batch(row: _Row) -> BatchFrozen:
    step, digest, groups, refusals = row
    frozen: BatchFrozen = _checked_batch([step, digest, json.loads(groups), refusals])
    return frozen


def _rate(row: _Row) -> PeerRate:
    peer, bytes_per_s, held_up = row
    rate: PeerRate = _checked_rate([peer, bytes_per_s, {0: False, 1: True}.get(held_up)])
    if not UPLINK_MIN <= rate.bytes_per_s < math.inf:
        raise PeerFault(f"bytes_per_s: expected at least {UPLINK_MIN}; found {rate.bytes_per_s}")
    return rate


# --- records -> rows

_Statement = tuple[str, tuple[Any, ...]]
_RAISE = (
    "INSERT INTO counters VALUES (?, ?) "
    "ON CONFLICT (name) DO UPDATE SET value = max(value, excluded.value)"
)


def _reward(reward: float) -> float | None:
    return None if math.isnan(reward) else reward


def _epoch_opened(record: EpochOpened) -> list[_Statement]:
    return [("INSERT INTO epochs VALUES (?, ?)", (record.epoch, record.resume_step))]


def _version_published(record: VersionPublished) -> list[_Statement]:
    row = (
        record.publish_seq,
        record.epoch,
        record.version,
        record.digest,
        record.path,
        record.full_bytes,
    )
    return [("INSERT INTO versions VALUES (?, ?, ?, ?, ?, ?, 0)", row)]


def _version_revoked(record: VersionRevoked) -> list[_Statement]:
    return [
        (
            "UPDATE versions SET revoked = 1 WHERE version = ? AND digest = ?",
            (record.version, record.digest),
        )
    ]


def _form_chosen(record: FormChosen) -> list[_Statement]:
    row = (record.publish_seq, record.base, record.frame_bytes)
    return [("INSERT OR REPLACE INTO forms VALUES (?, ?, ?)", row)]


def _prompt_taken(record: PromptTaken) -> list[_Statement]:
    return [
        ("INSERT INTO groups VALUES (?, ?, ?)", (record.group, record.cursor, record.prompt)),
        (_RAISE, ("cursor", record.cursor + 1)),
        (_RAISE, ("group", record.group + 1)),
    ]


def _lease_given(record: LeaseGiven) -> list[_Statement]:
    served, base = record.served, pack(record.base) if record.base.length else None
    row = (record.group, record.lease, record.attempt, record.worker, json.dumps(record.samples))
    return [
        (
            "INSERT INTO leases VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (*row, served.version, served.digest, base),
        )
    ]


def _sample_kept(record: SampleKept) -> list[_Statement]:
    kept = record.trajectory
    spans = pack(_Spans(kept.spans))
    row = (
        record.group,
        kept.sample,
        record.lease,
        record.attempt,
        kept.worker,
        kept.tokens,
        kept.logprobs,
        spans,
    )
    more = (record.fingerprint, _reward(kept.reward))
    return [("INSERT INTO samples VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", (*row, *more))]


def _sample_rewarded(record: SampleRewarded) -> list[_Statement]:
    change = "UPDATE samples SET reward = ? WHERE group_id = ? AND sample = ?"
    return [(change, (_reward(record.reward), record.group, record.sample))]


def _group_dropped(record: GroupDropped) -> list[_Statement]:
    return [("DELETE FROM groups WHERE group_id = ?", (record.group,))]


def _batch_frozen(record: BatchFrozen) -> list[_Statement]:
    row = (record.step, record.digest, json.dumps(record.groups), record.refusals)
    return [("INSERT OR REPLACE INTO batches VALUES (?, ?, ?, ?)", row)]


def _batch_committed(record: BatchCommitted) -> list[_Statement]:
    row = (record.step, record.epoch, record.digest, record.t_train_s)
    return [("INSERT OR REPLACE INTO commits VALUES (?, ?, ?, ?)", row)]


def _checkpoint_kept(record: CheckpointKept) -> list[_Statement]:
    return [(_RAISE, ("checkpoint", record.step))]


def _rates_measured(record: RatesMeasured) -> list[_Statement]:
    change = "INSERT OR REPLACE INTO rates VALUES (?, ?, ?)"  # the newest gets the highest rowid
    return [(change, (rate.peer, rate.bytes_per_s, rate.held_up)) for rate in record.rates]


_STATEMENTS: dict[type, Callable[[Any], list[_Statement]]] = {
    EpochOpened: _epoch_opened,
    VersionPublished: _version_published,
    VersionRevoked: _version_revoked,
    FormChosen: _form_chosen,
    PromptTaken: _prompt_taken,
    LeaseGiven: _lease_given,
    SampleKept: _sample_kept,
    SampleRewarded: _sample_rewarded,
    GroupDropped: _group_dropped,
    BatchFrozen: _batch_frozen,
    BatchCommitted: _batch_committed,
    CheckpointKept: _checkpoint_kept,
    RatesMeasured: _rates_measured,
}
