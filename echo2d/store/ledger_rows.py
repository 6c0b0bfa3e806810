"""The rows of the ledger's tables: how a record becomes rows, and how a row is checked and read back.

A reward of NaN is stored as NULL, which means "not scored yet". Counters never decrease.
Not here: files, transactions and what is deleted (`ledger`).
"""

import json
import math
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from typing import Any, Final, Generic, Literal, TypeVar

from echo2d.core.audit.baseline import GROSS
from echo2d.core.audit.events import LimitsLearnt
from echo2d.core.base.codec import pack, plain_reader, unpacker
from echo2d.core.base.ids import Digest, GroupId
from echo2d.core.broadcast.events import FormChosen, RatesMeasured
from echo2d.core.cluster.earned import EarnedKept, WorkerEarned
from echo2d.core.cluster.events import VersionPublished, VersionRevoked
from echo2d.core.coordinator.events import (
    CheckpointKept,
    CoordinatorRecord,
    EpochOpened,
    RunFactsKept,
    TotalsKept,
)
from echo2d.core.protocol.columns import columns_fault
from echo2d.core.protocol.evidence import TOLERANCES
from echo2d.core.protocol.trajectory import (
    GROUP_BYTES_MAX,
    Attachment,
    Partial,
    StoredGroup,
    TrajectoryRecord,
    unpack_logprobs,
    unpack_tokens,
)
from echo2d.core.tinker.events import (
    CheckpointDropped,
    CheckpointSaved,
    GradientDropped,
    KeptOperation,
    ModelForgotten,
    ModelMade,
    OperationOver,
    OperationTaken,
    ResultForgotten,
    SamplerOpened,
    SamplerOver,
    SessionOpened,
    SessionOver,
    StepSaved,
)
from echo2d.core.tinker.futures import Failed, Outcome
from echo2d.core.tinker.operations import ModelId, Operation, OperationKind
from echo2d.core.topology.uplink_rates import UPLINK_MIN, PeerRate
from echo2d.core.work.evaluation.events import Evaluated
from echo2d.core.work.events import (
    AcceptedResult,
    BatchCommitted,
    BatchFrozen,
    DeliveriesMeasured,
    EpisodeForgotten,
    GroupDropped,
    LeaseGiven,
    PromptGivenBack,
    PromptTaken,
    RecoveredTurn,
    RowJudged,
    SampleKept,
    SampleLeftOut,
    SampleReturned,
    SampleRewarded,
    TaskBegun,
    TaskProgress,
    TurnAnswered,
    TurnKept,
    WorkerDelivery,
)
from echo2d.errors import PeerFault
from echo2d.store.row_sums import SummedSchema

# Counters that `mark_restored` sets: all epochs and publish numbers up to their values may be used already.
EPOCH_FLOOR: Final = "epoch_floor"
PUBLISH_FLOOR: Final = "publish_floor"
SCHEMA_VERSION = 22
SCHEMA = SummedSchema(
    """
CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE epochs (
    epoch INTEGER PRIMARY KEY, resume_step INTEGER NOT NULL, learner TEXT NOT NULL,
    steps INTEGER NOT NULL DEFAULT 0);
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE versions (
    publish_seq INTEGER PRIMARY KEY, epoch INTEGER NOT NULL, version INTEGER NOT NULL,
    digest BLOB NOT NULL,
    path TEXT NOT NULL, full_bytes INTEGER NOT NULL, revoked INTEGER NOT NULL DEFAULT 0);
CREATE TABLE forms (publish_seq INTEGER PRIMARY KEY, base BLOB, frame_bytes INTEGER NOT NULL);
CREATE TABLE groups (
    group_id INTEGER PRIMARY KEY, cursor INTEGER NOT NULL, prompt BLOB NOT NULL,
    task TEXT NOT NULL, source_row TEXT NOT NULL, sampling TEXT NOT NULL,
    tags TEXT NOT NULL);
CREATE TABLE attachments (digest BLOB PRIMARY KEY, content BLOB NOT NULL, drawn INTEGER NOT NULL);
CREATE TABLE attached (
    group_id INTEGER NOT NULL REFERENCES groups ON DELETE CASCADE, name TEXT NOT NULL,
    digest BLOB NOT NULL REFERENCES attachments, size INTEGER NOT NULL,
    PRIMARY KEY (group_id, name)) WITHOUT ROWID;
CREATE INDEX attached_digests ON attached (digest);
CREATE TRIGGER forget_attachment AFTER DELETE ON attached BEGIN
    DELETE FROM attachments WHERE digest = OLD.digest AND drawn <= 0
    AND NOT EXISTS (SELECT 1 FROM attached WHERE digest = OLD.digest);
END;
CREATE TABLE leases (
    group_id INTEGER NOT NULL REFERENCES groups ON DELETE CASCADE, lease INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    worker TEXT NOT NULL, samples TEXT NOT NULL, version INTEGER NOT NULL, digest BLOB NOT NULL,
    base BLOB,
    PRIMARY KEY (group_id, lease, attempt));
CREATE TABLE samples (
    group_id INTEGER NOT NULL REFERENCES groups ON DELETE CASCADE, sample INTEGER NOT NULL,
    lease INTEGER NOT NULL, attempt INTEGER NOT NULL, fingerprint BLOB NOT NULL,
    trajectory BLOB NOT NULL, reward REAL, parts TEXT, PRIMARY KEY (group_id, sample));
CREATE TABLE left_out (
    group_id INTEGER NOT NULL REFERENCES groups ON DELETE CASCADE, sample INTEGER NOT NULL,
    PRIMARY KEY (group_id, sample)) WITHOUT ROWID;
CREATE TABLE turns (
    group_id INTEGER NOT NULL REFERENCES groups ON DELETE CASCADE, sample INTEGER NOT NULL,
    turn INTEGER NOT NULL, lease INTEGER NOT NULL, attempt INTEGER NOT NULL,
    partial BLOB, finish TEXT NOT NULL, fingerprint BLOB NOT NULL, tokens BLOB, state BLOB,
    anew INTEGER, PRIMARY KEY (group_id, sample, turn));
CREATE TABLE tasks (
    task TEXT PRIMARY KEY, next_cursor INTEGER NOT NULL, data BLOB NOT NULL,
    texts BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE given_back (
    task TEXT NOT NULL, cursor INTEGER NOT NULL, PRIMARY KEY (task, cursor)) WITHOUT ROWID;
CREATE TABLE rows (
    task TEXT NOT NULL, source_row TEXT NOT NULL, groups INTEGER NOT NULL,
    equal INTEGER NOT NULL, volatility REAL NOT NULL, version INTEGER NOT NULL,
    PRIMARY KEY (task, source_row));
CREATE TABLE batches (step INTEGER PRIMARY KEY, digest BLOB NOT NULL, groups TEXT NOT NULL,
    refusals INTEGER NOT NULL);
CREATE TABLE commits (
    step INTEGER, epoch INTEGER, digest BLOB NOT NULL, t_train_s REAL NOT NULL,
    PRIMARY KEY (step, epoch)) WITHOUT ROWID;
CREATE TABLE limits (
    engine_class TEXT PRIMARY KEY, k REAL NOT NULL, misses REAL NOT NULL,
    tolerance INTEGER NOT NULL, rerouted REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE evaluations (
    number INTEGER PRIMARY KEY, name TEXT NOT NULL, version INTEGER NOT NULL, digest BLOB NOT NULL,
    found BLOB NOT NULL);
CREATE TABLE earned (
    worker TEXT PRIMARY KEY, accepted INTEGER NOT NULL, trained INTEGER NOT NULL,
    sent_bytes INTEGER NOT NULL);
CREATE TABLE deliveries (
    worker TEXT PRIMARY KEY, allowed INTEGER NOT NULL, tokens_per_s REAL NOT NULL, speed REAL NOT NULL);
CREATE TABLE tinker_models (model TEXT PRIMARY KEY, made BLOB NOT NULL);
CREATE TABLE tinker_checkpoints (path TEXT PRIMARY KEY, saved BLOB NOT NULL);
CREATE TABLE tinker_sessions (session TEXT PRIMARY KEY, caller TEXT NOT NULL);
CREATE TABLE tinker_samplers (
    sampler TEXT PRIMARY KEY, session TEXT NOT NULL, opened BLOB NOT NULL);
CREATE INDEX tinker_sampler_sessions ON tinker_samplers (session);
CREATE TABLE tinker_operations (
    model TEXT NOT NULL, number INTEGER NOT NULL, taken BLOB NOT NULL, ended INTEGER NOT NULL,
    needed INTEGER NOT NULL, result BLOB, PRIMARY KEY (model, number));
CREATE TABLE tinker_bodies (
    model TEXT NOT NULL, number INTEGER NOT NULL, body BLOB NOT NULL, PRIMARY KEY (model, number),
    FOREIGN KEY (model, number) REFERENCES tinker_operations ON DELETE CASCADE);
CREATE TABLE tinker_steps (model TEXT PRIMARY KEY, number INTEGER NOT NULL);
CREATE TABLE rates (peer TEXT PRIMARY KEY, bytes_per_s REAL NOT NULL, held_up INTEGER NOT NULL);
""",
    # Set to 0 at each start.
    unsummed={"attachments.drawn"},
)


@dataclass(frozen=True, slots=True)
class _Counter:
    """A counter that never decreases, even when rows are deleted."""

    name: Literal[
        "group", "checkpoint", "trained", "dropped", "turn", "epoch_floor", "publish_floor"
    ]
    value: int


@dataclass(frozen=True, slots=True)
class _Taken:
    """An operation of a client, without its body."""

    model: ModelId
    number: int
    kind: OperationKind
    digest: Digest
    arguments: bytes  # JSON, because it may hold any text
    body_bytes: int
    fault: bytes  # JSON
    adds: bool


# In `tinker_operations.ended`.
_OPEN, _ENDED, _FAILED = range(3)
# A result may be written with more characters than those in which the learner sent it.
_OUTCOME_BYTES_MAX = 256 << 20

# What would follow from a damaged row of each table.
MEANING: Final = {
    **dict.fromkeys(
        (
            "groups",
            "leases",
            "samples",
            "left_out",
            "turns",
            "attachments",
            "attached",
            "tasks",
            "given_back",
        ),
        "an answer that is not trained yet, or the order of prompts, would be read differently",
    ),
    **dict.fromkeys(
        ("counters", "epochs", "batches", "commits"),
        "it would not be known which steps are trained",
    ),
    "versions": "it would not be known which versions are published",
    "facts": "what the run was begun with would be read differently",
    **dict.fromkeys(
        ("tinker_models", "tinker_checkpoints"),
        "it would not be known whose checkpoint is where",
    ),
    **dict.fromkeys(
        ("tinker_sessions", "tinker_samplers"),
        "it would not be known which sessions and samplers clients have",
    ),
    **dict.fromkeys(
        ("tinker_operations", "tinker_bodies", "tinker_steps"),
        "the learner would compute another model than its client asked for",
    ),
    "evaluations": "the results of an evaluation would be read differently",
}
# Tables of measurements that a run makes again: a damaged row is forgotten.
FORGETTABLE: Final = ("deliveries", "earned", "forms", "limits", "rates", "rows")

_Row = tuple[Any, ...]
Read = TypeVar("Read")


@dataclass(frozen=True, slots=True)
class Query(Generic[Read]):
    """What to select from which table, and how to convert a row."""

    table: str
    sql: str
    # Converts a row; raises PeerFault, ValueError, TypeError or RecursionError if it is damaged.
    make: Callable[[_Row], Read]


_unpack_trajectory = unpacker(TrajectoryRecord, bytes_max=GROUP_BYTES_MAX)
_unpack_partial = unpacker(Partial, bytes_max=GROUP_BYTES_MAX)
_NO_PARTIAL = [b"", b"", [], [], [], []]


# --- rows -> records

_checked_group = plain_reader(StoredGroup)
_checked_score = plain_reader(SampleRewarded)
_checked_lease = plain_reader(LeaseGiven)
_checked_answer = plain_reader(AcceptedResult)
_checked_turn = plain_reader(TurnKept)
_checked_attachment = plain_reader(Attachment)
_checked_batch = plain_reader(BatchFrozen)
_checked_epoch = plain_reader(EpochOpened)
_checked_limits = plain_reader(LimitsLearnt)
_checked_rate = plain_reader(PeerRate)
_checked_row = plain_reader(RowJudged)
_unpack_evaluated = unpacker(Evaluated, bytes_max=64 << 10)
_unpack_made = unpacker(ModelMade, bytes_max=1 << 20)
_unpack_saved = unpacker(CheckpointSaved, bytes_max=2 << 20)
_unpack_opened = unpacker(SamplerOpened, bytes_max=1 << 20)
_unpack_taken = unpacker(_Taken, bytes_max=1 << 20)


def _group(row: _Row) -> StoredGroup:
    """A stored group without its trajectories, which are read from other rows."""
    group, cursor, prompt, task, source_row, sampling, tags = row
    stored: StoredGroup = _checked_group(
        [
            [group, prompt, [], [], json.loads(sampling), json.loads(tags)],
            cursor,
            [task, source_row, []],
        ]
    )
    if fault := stored.record.sampling.fault:
        raise PeerFault(fault)
    unpack_tokens(stored.record.prompt)
    return stored


def _trajectory(row: _Row) -> tuple[GroupId, TrajectoryRecord]:
    group, sample, packed, reward, parts = row
    score: SampleRewarded = _checked_score(
        [group, sample, math.nan if reward is None else reward, json.loads(parts or "[]")]
    )
    if not isinstance(packed, bytes):
        raise PeerFault(f"trajectory: expected bytes; found {type(packed).__name__}")
    kept: TrajectoryRecord = _unpack_trajectory(packed)
    if kept.sample != sample:
        raise PeerFault(f"its trajectory is of sample {kept.sample}")
    _require_whole(kept)
    return score.group, kept.scored(math.nan if reward is None else score.reward, score.parts)


def _lease(row: _Row) -> LeaseGiven:
    group, lease, attempt, worker, samples, version, digest, packed = row
    given: LeaseGiven = _checked_lease(
        [group, lease, attempt, worker, json.loads(samples), [version, digest], _NO_PARTIAL]
    )
    if packed is None:
        return given
    base: Partial = _unpack_partial(packed)
    _require_whole(base)
    return replace(given, base=base)


def _require_whole(kept: TrajectoryRecord | Partial) -> None:
    """PeerFault: tokens, logprobs and columns differ in number, or spans are missing."""
    same = len(unpack_tokens(kept.tokens)) == len(unpack_logprobs(kept.logprobs))
    # A partial may have no token that was written, so it needs no spans then.
    whole = kept.spans or (isinstance(kept, Partial) and (kept.given or not kept.tokens))
    if not same or not whole:
        raise PeerFault("its tokens, logprobs and spans do not fit together")
    if fault := columns_fault(kept.columns, kept.length):
        raise PeerFault(fault)


def _turn(row: _Row) -> RecoveredTurn:
    *facts, packed, finish, fingerprint, tokens, state, anew, state_before = row
    kept: TurnKept = _checked_turn([*facts, _NO_PARTIAL, finish, fingerprint])
    partial: Partial = _unpack_partial(packed)
    _require_whole(partial)
    kept = replace(kept, partial=partial)
    answered = None
    if tokens is not None:
        unpack_tokens(tokens)
        answered = TurnAnswered(kept.group, kept.sample, kept.turn, tokens, state, bool(anew))
    return RecoveredTurn(kept, answered, state_before)


def _attached(row: _Row) -> tuple[GroupId, Attachment]:
    group, *facts = row
    found: Attachment = _checked_attachment(facts)
    return group, found


def _answer(row: _Row) -> AcceptedResult:
    lease, attempt, sample, fingerprint = row
    answered: AcceptedResult = _checked_answer([[lease, attempt], sample, fingerprint])
    return answered


def _epoch(row: _Row) -> EpochOpened:
    opened: EpochOpened = _checked_epoch(row)
    if opened.steps < 0:
        raise PeerFault(f"expected steps >= 0; found {opened.steps}")
    return opened


def _fact(row: _Row) -> tuple[str, str]:
    name, value = row
    if not isinstance(name, str) or not isinstance(value, str):
        raise PeerFault("expected text")
    return name, value


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


def _row_judged(row: _Row) -> RowJudged:
    task, source_row, *facts = row
    judged: RowJudged = _checked_row([[task, source_row, []], *facts])
    if not 0 <= judged.volatility < math.inf:
        raise PeerFault(f"volatility: expected at least 0; found {judged.volatility}")
    return judged


def _evaluated(row: _Row) -> Evaluated:
    number, name, version, digest, packed = row
    if not isinstance(packed, bytes):
        raise PeerFault(f"found: expected bytes; found {type(packed).__name__}")
    found: Evaluated = _unpack_evaluated(packed)
    if (found.number, found.name, found.version, found.digest) != (number, name, version, digest):
        raise PeerFault("it is another evaluation's")
    return found


def _model_made(row: _Row) -> ModelMade:
    name, packed = row
    made: ModelMade = _unpack_made(packed)
    if made.model != name:
        raise PeerFault("it is another model's")
    return made


def _checkpoint_saved(row: _Row) -> CheckpointSaved:
    path, packed = row
    saved: CheckpointSaved = _unpack_saved(packed)
    if saved.path != path:
        raise PeerFault("it is another checkpoint's")
    return saved


def _sampler_opened(row: _Row) -> SamplerOpened:
    name, session, packed = row
    opened: SamplerOpened = _unpack_opened(packed)
    if (opened.sampler, opened.session) != (name, session):
        raise PeerFault("it is another sampler's")
    return opened


def _operation(row: _Row) -> KeptOperation:
    """An operation without its body, which is in another table."""
    model, number, packed, ended, stored, needed = row
    taken: _Taken = _unpack_taken(packed)
    if (taken.model, taken.number) != (model, number):
        raise PeerFault("it is another operation's")
    arguments, fault = json.loads(taken.arguments), json.loads(taken.fault)
    if not isinstance(arguments, dict) or not isinstance(fault, str | None):
        raise PeerFault("expected the arguments and the fault of an operation")
    if ended not in (_OPEN, _ENDED, _FAILED) or (ended == _OPEN and stored is not None):
        raise PeerFault(f"ended: expected {_OPEN}, {_ENDED} or {_FAILED} that fits its result")
    return KeptOperation(
        Operation(
            taken.model,
            taken.number,
            taken.kind,
            taken.digest,
            arguments,
            body_bytes=taken.body_bytes,
            fault=fault,
            adds=taken.adds,
        ),
        None if stored is None else _outcome(stored, failed=ended == _FAILED),
        ended=ended != _OPEN,
        failed=ended == _FAILED,
        needed=bool(needed),
    )


def _outcome(stored: Any, *, failed: bool) -> Outcome:
    """A result, which is text if it is JSON."""
    if not isinstance(stored, str | bytes) or len(stored) > _OUTCOME_BYTES_MAX:
        raise PeerFault(f"result: expected at most {_OUTCOME_BYTES_MAX} bytes")
    if isinstance(stored, bytes) and not failed:
        return stored
    match json.loads(stored) if isinstance(stored, str) else None:
        case [str(detail), ("user" | "server") as category] if failed:
            return Failed(detail, category)
        case dict(found) if not failed:
            return found
    raise PeerFault("result: expected that of an operation")


def _limits(row: _Row) -> LimitsLearnt:
    limits: LimitsLearnt = _checked_limits(row)
    if not (
        0 < limits.k <= GROSS.k
        and 0 < limits.misses <= GROSS.misses
        and limits.tolerance in range(len(TOLERANCES))
        and 0 < limits.rerouted <= GROSS.rerouted
    ):
        raise PeerFault(f"expected limits of an audit; found {limits}")
    return limits


# --- what `recover` reads

COUNTERS: Query[_Counter] = Query(
    "counters", "SELECT name, value FROM counters", plain_reader(_Counter)
)
NEWEST_EPOCH: Query[EpochOpened] = Query(
    "epochs",
    "SELECT epoch, resume_step, learner, steps FROM epochs ORDER BY epoch DESC LIMIT 1",
    _epoch,
)
PUBLISHED: Query[VersionPublished] = Query(
    "versions",
    "SELECT publish_seq, epoch, version, digest, path, full_bytes FROM versions "
    "WHERE NOT revoked ORDER BY publish_seq",
    plain_reader(VersionPublished),
)
NEWEST_FORM: Query[FormChosen] = Query(
    "forms",
    "SELECT publish_seq, base, frame_bytes FROM forms ORDER BY publish_seq DESC LIMIT 1",
    plain_reader(FormChosen),
)
GROUPS: Query[StoredGroup] = Query(
    "groups",
    "SELECT group_id, cursor, prompt, task, source_row, sampling, tags FROM groups ORDER BY group_id",
    _group,
)
TRAJECTORIES: Query[tuple[GroupId, TrajectoryRecord]] = Query(
    "samples",
    "SELECT group_id, sample, trajectory, reward, parts FROM samples "
    "WHERE (group_id, sample) NOT IN (SELECT group_id, sample FROM left_out) ORDER BY group_id, sample",
    _trajectory,
)
LEFT_OUT: Query[SampleLeftOut] = Query(
    "left_out",
    "SELECT group_id, sample FROM left_out ORDER BY group_id, sample",
    plain_reader(SampleLeftOut),
)
ATTACHED: Query[tuple[GroupId, Attachment]] = Query(
    "attached",
    "SELECT group_id, name, digest, size FROM attached ORDER BY group_id, name",
    _attached,
)
GIVEN: Query[LeaseGiven] = Query(
    "leases",
    "SELECT group_id, lease, attempt, worker, samples, version, digest, base "
    "FROM leases ORDER BY rowid",
    _lease,
)
TURNS: Query[RecoveredTurn] = Query(
    "turns",
    "SELECT this.group_id, this.sample, this.turn, this.lease, this.attempt, this.partial, this.finish, "
    "this.fingerprint, this.tokens, this.state, this.anew, before.state FROM turns AS this LEFT JOIN turns AS before "
    "ON before.group_id = this.group_id AND before.sample = this.sample AND before.turn = this.turn - 1 "
    "WHERE this.partial IS NOT NULL "
    "AND (this.group_id, this.sample) NOT IN (SELECT group_id, sample FROM samples) "
    "AND (this.group_id, this.sample) NOT IN (SELECT group_id, sample FROM left_out) "
    "ORDER BY this.group_id, this.sample",
    _turn,
)
ANSWERED: Query[AcceptedResult] = Query(
    "samples",
    "SELECT lease, attempt, sample, fingerprint FROM ("
    "SELECT 0 AS place, rowid AS at, lease, attempt, sample, fingerprint FROM turns WHERE turn UNION ALL "
    "SELECT 1, rowid, lease, attempt, sample, fingerprint FROM samples) ORDER BY place, at",
    _answer,
)
RATES: Query[PeerRate] = Query(
    "rates", "SELECT peer, bytes_per_s, held_up FROM rates ORDER BY rowid", _rate
)
DELIVERIES: Query[WorkerDelivery] = Query(
    "deliveries",
    "SELECT worker, allowed, tokens_per_s, speed FROM deliveries ORDER BY rowid",
    plain_reader(WorkerDelivery),
)
EARNED: Query[WorkerEarned] = Query(
    "earned",
    "SELECT worker, accepted, trained, sent_bytes FROM earned ORDER BY rowid",
    plain_reader(WorkerEarned),
)
TASK_CURSORS: Query[TaskProgress] = Query(
    "tasks",
    "SELECT task, next_cursor, data, texts FROM tasks ORDER BY task",
    plain_reader(TaskProgress),
)
GIVEN_BACK: Query[PromptGivenBack] = Query(
    "given_back",
    "SELECT task, cursor FROM given_back ORDER BY task, cursor",
    plain_reader(PromptGivenBack),
)
ROWS: Query[RowJudged] = Query(
    "rows",
    "SELECT task, source_row, groups, equal, volatility, version FROM rows ORDER BY rowid",
    _row_judged,
)
EVALUATED: Query[Evaluated] = Query(
    "evaluations",
    "SELECT number, name, version, digest, found FROM evaluations ORDER BY number",
    _evaluated,
)
TINKER_MODELS: Query[ModelMade] = Query(
    "tinker_models", "SELECT model, made FROM tinker_models ORDER BY rowid", _model_made
)
TINKER_CHECKPOINTS: Query[CheckpointSaved] = Query(
    "tinker_checkpoints",
    "SELECT path, saved FROM tinker_checkpoints ORDER BY rowid",
    _checkpoint_saved,
)
TINKER_SESSIONS: Query[SessionOpened] = Query(
    "tinker_sessions",
    "SELECT session, caller FROM tinker_sessions ORDER BY rowid",
    plain_reader(SessionOpened),
)
TINKER_SAMPLERS: Query[SamplerOpened] = Query(
    "tinker_samplers",
    "SELECT sampler, session, opened FROM tinker_samplers ORDER BY rowid",
    _sampler_opened,
)
TINKER_OPERATIONS: Query[KeptOperation] = Query(
    "tinker_operations",
    "SELECT model, number, taken, ended, result, needed FROM tinker_operations ORDER BY model, number",
    _operation,
)
TINKER_STEPS: Query[StepSaved] = Query(
    "tinker_steps", "SELECT model, number FROM tinker_steps ORDER BY rowid", plain_reader(StepSaved)
)
LIMITS: Query[LimitsLearnt] = Query(
    "limits",
    "SELECT engine_class, k, misses, tolerance, rerouted FROM limits ORDER BY engine_class",
    _limits,
)
FACTS: Query[tuple[str, str]] = Query("facts", "SELECT name, value FROM facts ORDER BY name", _fact)
FROZEN: Query[BatchFrozen] = Query(
    "batches", "SELECT step, digest, groups, refusals FROM batches ORDER BY step", _batch
)
COMMITTED: Query[BatchCommitted] = Query(
    "commits",
    "SELECT step, max(epoch) AS epoch, digest, t_train_s FROM commits GROUP BY step ORDER BY step",
    plain_reader(BatchCommitted),
)

# --- records -> rows

Statement = tuple[str, tuple[Any, ...]]
# The rows stay, so that repeated results are recognised. The state of the turn before ?1 is still needed.
_STATE_BEFORE = "CASE WHEN turn = ?1 - 1 THEN state END"
_FORGET_CONTENT = (
    f"UPDATE turns SET partial = NULL, tokens = NULL, state = {_STATE_BEFORE}, "
    f"sum = {SCHEMA.sum_of('turns', partial='NULL', tokens='NULL', state=_STATE_BEFORE)} "
    "WHERE group_id = ?2 AND sample = ?3 AND turn < ?4"
)
_FORGET_TURNS = "DELETE FROM turns WHERE group_id = ? AND sample = ?"
RAISE = (
    f"{SCHEMA.insert('counters')} ON CONFLICT (name) DO UPDATE SET value = max(value, excluded.value), "
    f"sum = {SCHEMA.sum_of('counters', value='max(value, excluded.value)')}"
)


# `drawn` counts the drawn prompts that have this attachment and no group yet. When a group is dropped and
# its prompt will be used again, `drawn` counts this prompt again.
ATTACH = (
    f"INSERT INTO attachments VALUES (?1, ?2, 1, {SCHEMA.sum_of('attachments', digest='?1', content='?2')}) "
    "ON CONFLICT (digest) DO UPDATE SET drawn = drawn + 1"
)
_DRAWN_AGAIN = (
    "UPDATE attachments SET drawn = drawn + (SELECT count(*) FROM attached "
    "WHERE group_id = ?1 AND attached.digest = attachments.digest) "
    "WHERE digest IN (SELECT digest FROM attached WHERE group_id = ?1)"
)
# After a restart no drawn prompt exists without a group.
FORGET_DRAWN = (
    "UPDATE attachments SET drawn = 0 WHERE drawn",
    "DELETE FROM attachments WHERE digest NOT IN (SELECT digest FROM attached)",
)


_NEXT_CURSOR = "max(next_cursor, excluded.next_cursor)"
_RAISE_CURSOR = (
    f"{SCHEMA.insert('tasks')} ON CONFLICT (task) DO UPDATE SET next_cursor = {_NEXT_CURSOR}, "
    f"sum = {SCHEMA.sum_of('tasks', next_cursor=_NEXT_CURSOR)}"
)
_BEGIN_TASK = (
    f"{SCHEMA.insert('tasks')} ON CONFLICT (task) DO UPDATE SET data = excluded.data, texts = excluded.texts, "
    f"sum = {SCHEMA.sum_of('tasks', data='excluded.data', texts='excluded.texts')}"
)

# Neither the learner nor the client needs them. The newest one says which numbers have ended.
_FORGET_OPERATIONS = (
    f"DELETE FROM tinker_operations WHERE model = ?1 AND ended != {_OPEN} AND result IS NULL AND NOT needed "
    f"AND number < (SELECT max(number) FROM tinker_operations WHERE model = ?1 AND ended != {_OPEN})"
)
_FORGET_BODIES = "DELETE FROM tinker_bodies WHERE model = ? AND number BETWEEN ? AND ?"
_NEED_NO_LONGER = (
    f"UPDATE tinker_operations SET needed = 0, sum = {SCHEMA.sum_of('tinker_operations', needed='0')} "
    "WHERE model = ? AND number BETWEEN ? AND ? AND needed"
)
_RAISE_STEP = (
    f"{SCHEMA.insert('tinker_steps')} ON CONFLICT (model) DO UPDATE SET number = max(number, excluded.number), "
    f"sum = {SCHEMA.sum_of('tinker_steps', number='max(number, excluded.number)')}"
)


def _reward(reward: float) -> float | None:
    return None if math.isnan(reward) else reward


def _epoch_opened(record: EpochOpened) -> list[Statement]:
    row = (record.epoch, record.resume_step, record.learner, record.steps)
    return [(SCHEMA.insert("epochs"), row)]


def _run_facts_kept(record: RunFactsKept) -> list[Statement]:
    return [(SCHEMA.insert("facts", "INSERT OR REPLACE"), each) for each in record.facts]


def _totals_kept(record: TotalsKept) -> list[Statement]:
    return [(RAISE, ("trained", record.trained)), (RAISE, ("dropped", record.dropped))]


def _version_published(record: VersionPublished) -> list[Statement]:
    row = (
        record.publish_seq,
        record.epoch,
        record.version,
        record.digest,
        record.path,
        record.full_bytes,
        0,
    )
    return [(SCHEMA.insert("versions"), row)]


def _version_revoked(record: VersionRevoked) -> list[Statement]:
    return [
        (
            (
                f"UPDATE versions SET revoked = 1, sum = {SCHEMA.sum_of('versions', revoked='1')} "
                "WHERE version = ? AND digest = ?"
            ),
            (record.version, record.digest),
        )
    ]


def _form_chosen(record: FormChosen) -> list[Statement]:
    row = (record.publish_seq, record.base, record.frame_bytes)
    return [(SCHEMA.insert("forms", "INSERT OR REPLACE"), row)]


def _task_begun(record: TaskBegun) -> list[Statement]:
    return [(_BEGIN_TASK, (record.task, 0, record.data, record.texts))]


def _row_is_judged(record: RowJudged) -> list[Statement]:
    key = (record.source.task, record.source.row)
    if not record.groups:
        return [("DELETE FROM rows WHERE task = ? AND source_row = ?", key)]
    # A replaced row gets the highest rowid, so rowids have the order in which rows were judged.
    facts = (record.groups, record.equal, record.volatility, record.version)
    return [(SCHEMA.insert("rows", "INSERT OR REPLACE"), (*key, *facts))]


def _prompt_taken(record: PromptTaken) -> list[Statement]:
    return [
        (
            SCHEMA.insert("groups"),
            (
                record.group,
                record.cursor,
                record.prompt,
                record.source.task,
                record.source.row,
                json.dumps(astuple(record.sampling)),
                json.dumps([astuple(tag) for tag in record.tags]),
            ),
        ),
        (_RAISE_CURSOR, (record.source.task, record.cursor + 1, b"", b"")),
        (
            "DELETE FROM given_back WHERE task = ? AND cursor = ?",
            (record.source.task, record.cursor),
        ),
        (RAISE, ("group", record.group + 1)),
        *[
            statement
            for each in record.source.attachments
            for statement in (
                (SCHEMA.insert("attached"), (record.group, *each)),
                ("UPDATE attachments SET drawn = drawn - 1 WHERE digest = ?", (each.digest,)),
            )
        ],
    ]


def _lease_given(record: LeaseGiven) -> list[Statement]:
    served, base = record.served, pack(record.base) if record.base.length else None
    row = (record.group, record.lease, record.attempt, record.worker, json.dumps(record.samples))
    return [(SCHEMA.insert("leases"), (*row, served.version, served.digest, base))]


def _sample_kept(record: SampleKept) -> list[Statement]:
    kept = record.trajectory
    row = (record.group, kept.sample, record.lease, record.attempt, record.fingerprint)
    insert_it = (SCHEMA.insert("samples"), (*row, pack(kept), _reward(kept.reward), None))
    if not kept.given:
        return [insert_it]
    return [insert_it, (_FORGET_CONTENT, (0, record.group, kept.sample, kept.turns + 1))]


def _turn_kept(record: TurnKept) -> list[Statement]:
    group, sample, turn = record.group, record.sample, record.turn
    row = (group, sample, turn, record.lease, record.attempt)
    content = (pack(record.partial), record.finish, record.fingerprint)
    return [
        (_FORGET_CONTENT, (turn, group, sample, turn)),
        (SCHEMA.insert("turns"), (*row, *content, None, None, None)),
    ]


def _turn_answered(record: TurnAnswered) -> list[Statement]:
    change = (
        "UPDATE turns SET tokens = ?1, state = ?2, anew = ?3, "
        f"sum = {SCHEMA.sum_of('turns', tokens='?1', state='?2', anew='?3')} "
        "WHERE group_id = ?4 AND sample = ?5 AND turn = ?6"
    )
    facts = (record.tokens, record.state, record.anew)
    return [(change, (*facts, record.group, record.sample, record.turn))]


def _episode_forgotten(record: EpisodeForgotten) -> list[Statement]:
    return [(_FORGET_TURNS, (record.group, record.sample))]


def _sample_rewarded(record: SampleRewarded) -> list[Statement]:
    change = (
        f"UPDATE samples SET reward = ?1, parts = ?2, sum = {SCHEMA.sum_of('samples', reward='?1', parts='?2')} "
        "WHERE group_id = ?3 AND sample = ?4"
    )
    parts = json.dumps([astuple(part) for part in record.parts]) if record.parts else None
    return [(change, (_reward(record.reward), parts, record.group, record.sample))]


def _sample_returned(record: SampleReturned) -> list[Statement]:
    delete = "DELETE FROM samples WHERE group_id = ? AND sample = ?"
    row = (record.group, record.sample)
    return [(delete, row), (_FORGET_TURNS, row)]


def _sample_left_out(record: SampleLeftOut) -> list[Statement]:
    # If the sample has a row of `samples`, that row stays, so that repeated results are recognised.
    return [(SCHEMA.insert("left_out"), (record.group, record.sample))]


def _limits_learnt(record: LimitsLearnt) -> list[Statement]:
    row = (record.engine_class, record.k, record.misses, record.tolerance, record.rerouted)
    return [(SCHEMA.insert("limits", "INSERT OR REPLACE"), row)]


def _version_evaluated(record: Evaluated) -> list[Statement]:
    row = (record.number, record.name, record.version, record.digest, pack(record))
    return [(SCHEMA.insert("evaluations"), row)]


def _tinker_model_made(record: ModelMade) -> list[Statement]:
    return [(SCHEMA.insert("tinker_models"), (record.model, pack(record)))]


def _tinker_model_forgotten(record: ModelForgotten) -> list[Statement]:
    return [("DELETE FROM tinker_models WHERE model = ?", (record.model,))]


def _tinker_checkpoint_saved(record: CheckpointSaved) -> list[Statement]:
    change = SCHEMA.insert("tinker_checkpoints", "INSERT OR REPLACE")
    return [(change, (record.path, pack(record)))]


def _tinker_checkpoint_dropped(record: CheckpointDropped) -> list[Statement]:
    return [("DELETE FROM tinker_checkpoints WHERE path = ?", (record.path,))]


def _tinker_session_opened(record: SessionOpened) -> list[Statement]:
    return [(SCHEMA.insert("tinker_sessions"), (record.session, record.caller))]


def _tinker_session_over(record: SessionOver) -> list[Statement]:
    session = record.session
    # Its models are SESSION:train:N, and ";" follows ":".
    models = "WHERE model > ? AND model < ?", (f"{session}:", f"{session};")
    return [
        ("DELETE FROM tinker_sessions WHERE session = ?", (session,)),
        ("DELETE FROM tinker_samplers WHERE session = ?", (session,)),
        (f"DELETE FROM tinker_operations {models[0]}", models[1]),
        (f"DELETE FROM tinker_steps {models[0]}", models[1]),
    ]


def _tinker_sampler_opened(record: SamplerOpened) -> list[Statement]:
    row = (record.sampler, record.session, pack(record))
    # It is there already if it goes on to other weights.
    moved = SCHEMA.sum_of("tinker_samplers", opened="excluded.opened")
    change = f"ON CONFLICT (sampler) DO UPDATE SET opened = excluded.opened, sum = {moved}"
    return [(f"{SCHEMA.insert('tinker_samplers')} {change}", row)]


def _tinker_sampler_over(record: SamplerOver) -> list[Statement]:
    return [("DELETE FROM tinker_samplers WHERE sampler = ?", (record.sampler,))]


def _tinker_operation_taken(record: OperationTaken) -> list[Statement]:
    of = record.operation
    key = of.model, of.number
    taken = _Taken(
        *key,
        of.kind,
        of.digest,
        json.dumps(dict(of.arguments)).encode(),
        len(of.body),
        json.dumps(of.fault).encode(),
        of.adds,
    )
    return [
        (SCHEMA.insert("tinker_operations"), (*key, pack(taken), _OPEN, 1, None)),
        # A table of its own, so that the end of the operation does not write the body again.
        (SCHEMA.insert("tinker_bodies"), (*key, of.body)),
    ]


def _tinker_operation_over(record: OperationOver) -> list[Statement]:
    change = (
        "UPDATE tinker_operations SET ended = ?1, result = ?2, needed = ?5, "
        f"sum = {SCHEMA.sum_of('tinker_operations', ended='?1', result='?2', needed='?5')} "
        "WHERE model = ?3 AND number = ?4"
    )
    match record.result:
        case Failed(detail, category):
            facts: tuple[int, str | bytes] = _FAILED, json.dumps([detail, category])
        case bytes():
            facts = _ENDED, record.result
        case _:
            facts = _ENDED, json.dumps(record.result)
    key = record.model, record.number
    changes: list[Statement] = [(change, (*facts, *key, int(record.needed)))]
    # What has failed is never computed again.
    if record.needed and not isinstance(record.result, Failed):
        return changes
    return [*changes, (_FORGET_BODIES, (*key, record.number))]


def _tinker_gradient_dropped(record: GradientDropped) -> list[Statement]:
    return _needed_no_longer(record.model, record.first, record.last)


def _needed_no_longer(model: ModelId, first: int, last: int) -> list[Statement]:
    return [
        (_NEED_NO_LONGER, (model, first, last)),
        (_FORGET_BODIES, (model, first, last)),
        (_FORGET_OPERATIONS, (model,)),
    ]


def _tinker_result_forgotten(record: ResultForgotten) -> list[Statement]:
    change = (
        f"UPDATE tinker_operations SET result = NULL, sum = {SCHEMA.sum_of('tinker_operations', result='NULL')} "
        "WHERE model = ? AND number = ?"
    )
    key = record.model, record.number
    return [(change, key), (_FORGET_OPERATIONS, (record.model,))]


def _tinker_step_saved(record: StepSaved) -> list[Statement]:
    key = record.model, record.number
    return [
        (_RAISE_STEP, key),
        *_needed_no_longer(record.model, 0, record.number),
    ]


def _group_dropped(record: GroupDropped) -> list[Statement]:
    keep = (
        f"INSERT OR IGNORE INTO given_back SELECT task, cursor, {SCHEMA.sum_of('given_back')} "
        "FROM groups WHERE group_id = ?"
    )
    return [
        *([(keep, (record.group,)), (_DRAWN_AGAIN, (record.group,))] if record.again else []),
        ("DELETE FROM groups WHERE group_id = ?", (record.group,)),
    ]


def _batch_frozen(record: BatchFrozen) -> list[Statement]:
    row = (record.step, record.digest, json.dumps(record.groups), record.refusals)
    return [(SCHEMA.insert("batches", "INSERT OR REPLACE"), row)]


def _batch_committed(record: BatchCommitted) -> list[Statement]:
    row = (record.step, record.epoch, record.digest, record.t_train_s)
    return [(SCHEMA.insert("commits", "INSERT OR REPLACE"), row)]


def _checkpoint_kept(record: CheckpointKept) -> list[Statement]:
    return [(RAISE, ("checkpoint", record.step))]


def _deliveries_measured(record: DeliveriesMeasured) -> list[Statement]:
    change = SCHEMA.insert("deliveries", "INSERT OR REPLACE")
    return [(change, (w.worker, w.allowed, w.tokens_per_s, w.speed)) for w in record.workers]


def _earned_kept(record: EarnedKept) -> list[Statement]:
    change = SCHEMA.insert("earned", "INSERT OR REPLACE")
    return [(change, astuple(each)) for each in record.workers]


def _rates_measured(record: RatesMeasured) -> list[Statement]:
    change = SCHEMA.insert("rates", "INSERT OR REPLACE")  # the newest row gets the highest rowid
    return [(change, (rate.peer, rate.bytes_per_s, rate.held_up)) for rate in record.rates]


_STATEMENTS: dict[type, Callable[[Any], list[Statement]]] = {
    EpochOpened: _epoch_opened,
    TotalsKept: _totals_kept,
    RunFactsKept: _run_facts_kept,
    VersionPublished: _version_published,
    VersionRevoked: _version_revoked,
    FormChosen: _form_chosen,
    TaskBegun: _task_begun,
    RowJudged: _row_is_judged,
    PromptTaken: _prompt_taken,
    LeaseGiven: _lease_given,
    SampleKept: _sample_kept,
    TurnKept: _turn_kept,
    TurnAnswered: _turn_answered,
    EpisodeForgotten: _episode_forgotten,
    SampleRewarded: _sample_rewarded,
    SampleReturned: _sample_returned,
    SampleLeftOut: _sample_left_out,
    GroupDropped: _group_dropped,
    BatchFrozen: _batch_frozen,
    BatchCommitted: _batch_committed,
    CheckpointKept: _checkpoint_kept,
    ModelMade: _tinker_model_made,
    CheckpointSaved: _tinker_checkpoint_saved,
    CheckpointDropped: _tinker_checkpoint_dropped,
    ModelForgotten: _tinker_model_forgotten,
    SessionOpened: _tinker_session_opened,
    SessionOver: _tinker_session_over,
    SamplerOpened: _tinker_sampler_opened,
    SamplerOver: _tinker_sampler_over,
    OperationTaken: _tinker_operation_taken,
    OperationOver: _tinker_operation_over,
    GradientDropped: _tinker_gradient_dropped,
    ResultForgotten: _tinker_result_forgotten,
    StepSaved: _tinker_step_saved,
    RatesMeasured: _rates_measured,
    DeliveriesMeasured: _deliveries_measured,
    EarnedKept: _earned_kept,
    LimitsLearnt: _limits_learnt,
    Evaluated: _version_evaluated,
}


def statements(record: CoordinatorRecord) -> list[Statement]:
    """The statements that write this record, each with its values."""
    return _STATEMENTS[type(record)](record)
