"""Runs a coordinator again from its ledger, for people who ask what a run was doing when it ended. It changes nothing.

    ledger.sqlite --copy--> Evidence --> audit: contradictions, in sentences
                               +-------> revive: the machine that `echo2d coordinate` would start, after its first turn

Only the config has the rules of a run; without it they are guessed from the stored data, and S is not judged.
"""

import math
import shutil
import sqlite3
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from heapq import merge
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from echo2d.config.coordinator import CoordinatorConfig
from echo2d.core.base.ids import Digest, GroupId, RequestId, RunId, Version
from echo2d.core.cluster.events import Persist, Reply
from echo2d.core.coordinator.events import (
    CoordinatorAction,
    DeadlinePassed,
    Recovered,
    SessionAsked,
)
from echo2d.core.coordinator.state import PLAN_SECRET_BYTES, CoordinatorState
from echo2d.core.protocol.control_messages import VersionKey
from echo2d.core.protocol.trajectory import (
    BatchBody,
    StoredGroup,
    TrajectoryRecord,
    batch_digest,
    pack_batch,
)
from echo2d.core.rules.run import STALENESS_MAX, RunRules
from echo2d.core.rules.tasks import TaskRules
from echo2d.core.status.json_form import status_json
from echo2d.core.work.events import BatchFrozen, DrawPrompt, GroupDropped, ScoreSample
from echo2d.errors import IntegrityFault, OperatorFault, StoreFault
from echo2d.runtime.coordinator.main import make_rules
from echo2d.runtime.run_dir.run_directory import LEDGER_FILE
from echo2d.store.ledger import Ledger

DAMAGE_MAX = 20  # lines of SQLite about a damaged file
ANY_RUN = RunId("0" * 16)


@dataclass(frozen=True, slots=True)
class Attempt:
    """The attempt that made the stored result of a sample."""

    group: int
    sample: int
    lease: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Evidence:
    """The content of a ledger. versions: all ever published. commits: (step, epoch, digest) of every epoch.

    granted: the granted attempts, if the ledger keeps them. damage: the faults that SQLite itself finds.
    """

    path: Path
    file_bytes: int
    recovered: Recovered
    versions: frozenset[VersionKey]
    revoked: int
    attempts: tuple[Attempt, ...]
    granted: tuple[dict[str, Any], ...]
    commits: tuple[tuple[int, int, Digest], ...]
    damage: tuple[str, ...]

    @property
    def stored(self) -> dict[GroupId, StoredGroup]:
        return {group.record.group: group for group in self.recovered.groups}


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules by which the run is judged. known: they are from its config; otherwise guessed from the ledger."""

    rules: RunRules
    known: bool


@dataclass(frozen=True, slots=True)
class Revival:
    """The machine's status after its first turn, and its actions in that turn. dropped: groups by reason."""

    status: dict[str, Any]
    dropped: dict[str, int]
    scored_again: int
    prompts_asked: int


# --- reading --------------------------------------------------------------------------------------------------------


def read_ledger(path: Path) -> Evidence:
    """Read a ledger or run directory. OperatorFault: it is no ledger. StoreFault: it is too damaged to be read."""
    source = path / LEDGER_FILE if path.is_dir() else path
    if not source.is_file():
        raise OperatorFault(
            f"{source} is not a file; expected a run directory or its {LEDGER_FILE}"
        )
    with tempfile.TemporaryDirectory(prefix="echo2d-replay-") as folder:
        copy = Path(folder) / LEDGER_FILE
        _copy(source, copy)
        try:
            with Ledger.open(copy) as ledger:
                recovered = ledger.recover()
            with closing(sqlite3.connect(copy)) as database:
                return _evidence(source, database, recovered)
        except (OperatorFault, StoreFault) as fault:
            raise type(fault)(str(fault).replace(str(copy), str(source))) from fault
        except sqlite3.Error as error:
            raise StoreFault(f"ledger {source}: {error}") from error


def _copy(source: Path, copy: Path) -> None:
    """Copy the ledger as of one moment, even beside a running coordinator; the original is only read."""
    if not source.with_name(source.name + "-wal").exists():
        shutil.copyfile(source, copy)
        return
    try:
        with (
            closing(sqlite3.connect(f"{source.absolute().as_uri()}?mode=ro", uri=True)) as original,
            closing(sqlite3.connect(copy)) as target,
        ):
            original.backup(target)
    except sqlite3.Error as error:
        raise OperatorFault(f"cannot read ledger {source}: {error}") from error


def _evidence(path: Path, database: sqlite3.Connection, recovered: Recovered) -> Evidence:
    damage = [
        text
        for (text,) in database.execute(f"PRAGMA integrity_check({DAMAGE_MAX})")
        if text != "ok"
    ]
    orphans = database.execute("PRAGMA foreign_key_check").fetchall()
    damage += [
        f"row {row} of {table} has no {parent}" for table, row, parent, _ in orphans[:DAMAGE_MAX]
    ]
    versions = database.execute("SELECT version, digest FROM versions").fetchall()
    attempts = database.execute(
        "SELECT group_id, sample, lease, attempt FROM samples ORDER BY group_id, sample"
    )
    commits = database.execute(
        "SELECT step, epoch, digest FROM commits ORDER BY step, epoch"
    ).fetchall()
    return Evidence(
        path,
        path.stat().st_size,
        recovered,
        frozenset(VersionKey(Version(version), Digest(digest)) for version, digest in versions),
        database.execute("SELECT count(*) FROM versions WHERE revoked").fetchone()[0],
        tuple(Attempt(*row) for row in attempts),
        tuple(_granted(database)),
        tuple((step, epoch, Digest(digest)) for step, epoch, digest in commits),
        tuple(damage),
    )


def _granted(database: sqlite3.Connection) -> Iterator[dict[str, Any]]:
    if database.execute("SELECT 1 FROM sqlite_master WHERE name = 'leases'").fetchone():
        names = ("group", "lease", "attempt", "worker", "samples", "version")
        rows = database.execute(
            "SELECT group_id, lease, attempt, worker, samples, version FROM leases ORDER BY rowid"
        )
        yield from (dict(zip(names, row, strict=True)) for row in rows)


def rules_of(config: Path) -> Rules:
    """The rules in the run's TOML."""
    return Rules(make_rules(CoordinatorConfig.load(config), ANY_RUN, ()), known=True)


def guessed_rules(recovered: Recovered) -> Rules:
    """Rules that agree with the stored data; S is large enough for all of them."""
    size = max(
        [1, *(1 + each.sample for group in recovered.groups for each in group.record.trajectories)]
    )
    groups = max([1, *(len(batch.groups) for batch in recovered.frozen)])
    rules = RunRules(
        run_id=ANY_RUN,
        staleness_max=STALENESS_MAX,
        publish_every=1,
        trajectories_per_step=size * groups,
        group_size=size,
        tasks=(TaskRules(max_new_tokens=1),),
        vocab_size=1,
        over_stale="drop",
        filter_zero_variance=False,
    )
    return Rules(rules, known=False)


# --- the audit ------------------------------------------------------------------------------------------------------


def audit(evidence: Evidence, rules: Rules) -> list[str]:
    """Contradictions that a run which kept its promises cannot have; empty: there are none."""
    return [
        *evidence.damage,
        *_batch_faults(evidence, rules),
        *_commit_faults(evidence),
        *_sample_faults(evidence),
        *_counter_faults(evidence.recovered),
    ]


def _batch_faults(evidence: Evidence, rules: Rules) -> Iterator[str]:
    owners: dict[GroupId, int] = {}
    committed, stored = {step for step, _, _ in evidence.commits}, evidence.stored
    for batch in evidence.recovered.frozen:
        for group in batch.groups:
            if owners.setdefault(group, batch.step) != batch.step:
                yield f"group {group} is in the batches of steps {owners[group]} and {batch.step}"
        missing = [group for group in batch.groups if group not in stored]
        if missing and batch.step in committed:
            yield f"step {batch.step} is committed, but of its batch the groups {missing} are gone"
        if not missing:
            yield from _full_batch_faults(batch, [stored[group] for group in batch.groups], rules)


def _full_batch_faults(
    batch: BatchFrozen, groups: list[StoredGroup], rules: Rules
) -> Iterator[str]:
    rebuilt = batch_digest(pack_batch(BatchBody.of(batch.step, [group.record for group in groups])))
    if rebuilt != batch.digest:
        yield f"batch {batch.step} was frozen as {_short(batch.digest)}; its groups give {_short(rebuilt)}"
    for group in groups:
        for fault in _member_faults(group, batch.step, rules):
            yield f"batch {batch.step}: group {group.record.group} {fault}"


def _member_faults(group: StoredGroup, step: int, rules: Rules) -> Iterator[str]:
    record, the = group.record, rules.rules
    count, size = len(record.trajectories), the.group_size
    samples = sorted([*(each.sample for each in record.trajectories), *record.left_out])
    whole = samples in (list(range(size)), list(range(2 * size)))
    if not whole or not 0 < count <= size:
        left_out = f", and leaves out {len(record.left_out)}" if record.left_out else ""
        yield f"has {count} of {size} trajectories{left_out}"
        return
    if any(math.isnan(each.reward) for each in record.trajectories):
        yield "has a trajectory without a reward"
    oldest = record.version_max if the.over_stale == "mask" else record.version_min
    if rules.known and step - 1 - oldest > the.staleness_max:
        yield f"has tokens of version {oldest}, which is {step - 1 - oldest} steps old; S is {the.staleness_max}"
    if record.version_max > step - 1:
        yield f"has tokens of version {record.version_max}, which this step or a later one made"


def _commit_faults(evidence: Evidence) -> Iterator[str]:
    recovered = evidence.recovered
    frozen = {batch.step: batch.digest for batch in recovered.frozen}
    for step, epoch, digest in evidence.commits:
        if step not in frozen:
            yield f"step {step} was committed in epoch {epoch}, but its batch is gone"
        elif frozen[step] != digest:
            yield f"step {step} was committed in epoch {epoch} as {_short(digest)}; its batch is {_short(frozen[step])}"
        if epoch > recovered.epoch:
            yield f"step {step} was committed in epoch {epoch}, which was never opened"
    steps = {step for step, _, _ in evidence.commits if step > recovered.checkpoint}
    for before, step in pairwise([recovered.checkpoint, *sorted(steps)]):
        if step > before + 1:
            yield f"step {before + 1} was never committed, a later one was"


def _sample_faults(evidence: Evidence) -> Iterator[str]:
    seen: dict[tuple[int, int, int], int] = {}
    for each in evidence.attempts:
        first = seen.setdefault((each.lease, each.attempt, each.sample), each.group)
        if first != each.group:
            yield f"one result (lease {each.lease}, attempt {each.attempt}) is in the groups {first} and {each.group}"
    for group in evidence.recovered.groups:
        for trajectory in group.record.trajectories:
            if fault := _trajectory_fault(trajectory, evidence.versions):
                yield f"group {group.record.group}, sample {trajectory.sample}: {fault}"


def _trajectory_fault(trajectory: TrajectoryRecord, versions: frozenset[VersionKey]) -> str:
    written = [(each.start, each.end) for each in trajectory.spans]
    given = [(each.start, each.end) for each in trajectory.given]
    edges = [0, *chain(*merge(written, given)), trajectory.length]
    if edges[::2] != edges[1::2] or not trajectory.tokens:
        return "its spans and given tokens do not cover its tokens"
    if len(trajectory.logprobs) != len(trajectory.tokens):
        return "not one logprob for each token"
    unknown = [span.version for span in trajectory.spans if span.key not in versions]
    return f"version {unknown[0]} that wrote for it was never published" if unknown else ""


def _counter_faults(recovered: Recovered) -> Iterator[str]:
    if any(group.record.group >= recovered.next_group for group in recovered.groups):
        yield f"the next group would be {recovered.next_group}, and there is one with that number or a higher one"
    for task in {group.source.task for group in recovered.groups}:
        behind = recovered.next_cursor(task)
        if any(g.cursor >= behind for g in recovered.groups if g.source.task == task):
            yield f"the next prompt would be {behind}, and it or a later one has been drawn"


def _short(digest: Digest) -> str:
    return digest.hex()[:12]


# --- the machine ----------------------------------------------------------------------------------------------------


def revive(evidence: Evidence, rules: Rules, *, at_step: int | None = None) -> Revival:
    """The state of a coordinator that starts from this ledger. at_step: after a learner has opened a session there.

    IntegrityFault: it refuses to start, or breaks an invariant. OperatorFault: no session can begin at that step.
    """
    try:
        state = CoordinatorState(
            rules.rules, evidence.recovered, plan_secret=bytes(PLAN_SECRET_BYTES), now=0.0
        )
        actions = state.handle(DeadlinePassed(), now=0.0)
        if at_step is not None:
            actions += state.handle(SessionAsked(RequestId(0), at_step, take_over=True), now=0.0)
        state.check()
    except AssertionError as broken:
        raise IntegrityFault(f"the coordinator breaks an invariant: {broken}") from broken
    for action in actions:
        if isinstance(action, Reply) and isinstance(action.body, dict) and "error" in action.body:
            raise OperatorFault(f"no session can begin at step {at_step}: {action.body['detail']}")
    return Revival(
        status_json(state.status()),
        dict(_drops(actions)),
        sum(isinstance(action, ScoreSample) for action in actions),
        sum(isinstance(action, DrawPrompt) for action in actions),
    )


def _drops(actions: list[CoordinatorAction]) -> Counter[str]:
    records = [action.record for action in actions if isinstance(action, Persist)]
    return Counter(record.reason for record in records if isinstance(record, GroupDropped))


# --- answers for people ---------------------------------------------------------------------------------------------


def waiting_groups(evidence: Evidence, rules: Rules) -> dict[str, int]:
    """The number of stored groups that are in no batch, by their progress."""
    held = {group for batch in evidence.recovered.frozen for group in batch.groups}
    groups = [group for group in evidence.recovered.groups if group.record.group not in held]
    return dict(Counter(_progress(group, rules.rules.group_size) for group in groups))


def _progress(group: StoredGroup, size: int) -> str:
    trajectories = group.record.trajectories
    if len(trajectories) + len(group.record.left_out) < size:
        return "waiting for results"
    return (
        "waiting for rewards"
        if any(math.isnan(each.reward) for each in trajectories)
        else "complete"
    )


def batches(evidence: Evidence) -> list[dict[str, Any]]:
    """Every frozen batch: its digest, and the epochs that committed it."""
    epochs: dict[int, list[int]] = defaultdict(list)
    for step, epoch, _ in evidence.commits:
        epochs[step].append(epoch)
    stored = evidence.stored
    return [
        {
            "step": batch.step,
            "digest": batch.digest.hex(),
            "groups": list(batch.groups),
            "missing": sum(group not in stored for group in batch.groups),
            "refusals": batch.refusals,
            "committed_in_epochs": epochs[batch.step],
        }
        for batch in evidence.recovered.frozen
    ]


def group_story(evidence: Evidence, group: int) -> dict[str, Any]:
    """The durable facts about one group. OperatorFault: it is not in the ledger; the text says why that may be."""
    recovered, stored = evidence.recovered, evidence.stored.get(GroupId(group))
    if group >= recovered.next_group:
        raise OperatorFault(
            f"group {group} was never admitted; the next one is {recovered.next_group}"
        )
    if stored is None:
        trained = (
            f", or trained on in a step up to checkpoint {recovered.checkpoint}"
            if recovered.checkpoint
            else ""
        )
        raise OperatorFault(
            f"group {group} was dropped{trained}; the log says more (grep -w group={group})"
        )
    made = {each.sample: each for each in evidence.attempts if each.group == group}
    return {
        "group": group,
        "cursor": stored.cursor,
        "prompt_tokens": len(stored.record.prompt) // 4,
        "granted": [grant for grant in evidence.granted if grant["group"] == group],
        "trajectories": [
            _trajectory(each, made[each.sample]) for each in stored.record.trajectories
        ],
        "batch": next((batch for batch in batches(evidence) if group in batch["groups"]), None),
    }


def _trajectory(trajectory: TrajectoryRecord, made: Attempt) -> dict[str, Any]:
    return {
        "sample": trajectory.sample,
        "lease": made.lease,
        "attempt": made.attempt,
        "worker": trajectory.worker,
        "tokens": len(trajectory.tokens) // 4,
        "versions": sorted({span.version for span in trajectory.spans}),
        "reward": None if math.isnan(trajectory.reward) else trajectory.reward,
    }
