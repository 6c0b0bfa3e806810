"""A `MemoryRun` for tests: it checks the state after every event, and the invariants of every batch.

`slow`, `closed`, `receive_only` and `reward` change what its peers and its task do. `crash` forgets
everything but the ledger.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from echo2d.core.base.ids import Digest, FormId, GroupId, RunId, Version
from echo2d.core.cluster.events import DeleteVersion, DialBack, Reply
from echo2d.core.coordinator.events import (
    CheckpointAsked,
    CommitAsked,
    CoordinatorAction,
    CoordinatorEvent,
    CoordinatorRecord,
    DeadlinePassed,
    RefuseAsked,
)
from echo2d.core.protocol.control_messages import (
    EncodeVersion,
    HeldLease,
    Hello,
    LeaseGranted,
    SampleAnswered,
    ToPeer,
    VersionKey,
)
from echo2d.core.protocol.trajectory import (
    BatchBody,
    Source,
    TrajectoryScore,
    batch_digest,
    unpack_batch,
)
from echo2d.core.rules.run import DisseminationTable, RunRules
from echo2d.core.rules.tasks import EvalRules, RowFilter, TaskRules
from echo2d.core.weights.signed_index import Root
from echo2d.core.work.events import (
    BatchFrozen,
    DrawPrompt,
    PromptDrawn,
    PromptsEnded,
    SampleKept,
    ScoreSample,
    StepEnvironment,
    TurnKept,
)
from echo2d.core.work.leases import TRAINING, kind_of
from echo2d_lab.standins.memory_run import FakePeer, MemoryRun

RULES = RunRules(
    run_id=RunId("run-1"),
    staleness_max=2,
    publish_every=1,
    trajectories_per_step=4,
    group_size=2,
    group_min=2,
    group_patience=0.0,
    tasks=(TaskRules(max_new_tokens=8, stop_token_ids=(1,)),),
    vocab_size=32,
    over_stale="drop",
    filter_zero_variance=True,
    dissemination=DisseminationTable(shape="chain", chains=1),
)


def rules(before: Any = None, **keys: Any) -> RunRules:
    """The default rules with other values; also keys of [dissemination], and of [activation] except its mode."""
    parts, before = {}, before or RULES
    for part in ("dissemination", "activation"):
        table = getattr(before, part)
        names = (each for each in table.values() if (part, each) != ("activation", "mode"))
        if told := {name: keys.pop(name) for name in list(names) if name in keys}:
            parts[part] = replace(table, **told)
    changed: RunRules = replace(before, **parts, **keys)
    return changed


def with_room(before: RunRules, max_new_tokens: int) -> RunRules:
    """The same rules with this many tokens per answer."""
    tasks = tuple(replace(task, max_new_tokens=max_new_tokens) for task in before.tasks)
    return replace(before, tasks=tasks)


def version_digest(version: int, salt: int = 0) -> Digest:
    return Digest(bytes([version % 251, salt]) * 16)


def version_key(version: int, salt: int = 0) -> VersionKey:
    return VersionKey(Version(version), version_digest(version, salt))


class World(MemoryRun):
    """See the module docstring.

    actions: of the last event. done: versions that may be deleted. closed: peers that nobody can
    dial. slow: peers at which no version arrives. kept: durable results. step_of: the step of
    every group that was ever frozen. digests: of the frozen batches. ends: by task, its number of
    prompts. rows: returns the name of a prompt's row.
    """

    def __init__(self, the_rules: RunRules = RULES) -> None:
        self.actions: list[CoordinatorAction] = []
        self.done: list[DeleteVersion] = []
        self.closed: set[str] = set()
        self.receive_only: set[str] = set()
        self.slow: set[str] = set()
        self.reward: Callable[[int, int], float | None] = lambda cursor, sample: float(sample % 2)
        self.ends: dict[str, int] = {}
        self.rows: Callable[[int], str] = lambda cursor: ""
        self.trained: dict[int, BatchBody] = {}
        self.kept: set[tuple[HeldLease, int]] = set()
        self.step_of: dict[GroupId, int] = {}
        self.digests: dict[int, Digest] = {}
        # The group of every lease ever granted.
        self.groups: dict[HeldLease, GroupId] = {}
        super().__init__(the_rules)

    def handle(self, event: CoordinatorEvent) -> list[CoordinatorAction]:
        self.actions = super().handle(event)
        self.state.check()
        return self.actions

    def pass_time(self, seconds: float) -> None:
        """Move the clock ahead; every deadline in this time is handled when it is due."""
        end = self.now + seconds
        for _ in range(1000):
            wake_at = self.state.wake_at()
            if wake_at is None or wake_at > end:
                break
            self.now = max(self.now, wake_at)
            self.handle(DeadlinePassed())
        else:
            raise AssertionError("the clock stands still")
        self.now = end

    def crash(self) -> None:
        """Kill the coordinator and the seed, and start both again. All messages under way are lost."""
        self.pending.clear()
        self.now += 1.0
        self.state = self._boot()
        self.state.check()
        for peer in list(self.peers.values()):
            self.connect(peer.name, kind=peer.kind, slots=peer.slots, trusted=peer.trusted)

    # --- learner

    def publish(self, version: int, *, salt: int = 0, epoch: int | None = None) -> Reply:
        return self.publish_key(version_key(version, salt), epoch=epoch)

    @property
    def newest_version(self) -> int | None:
        newest = self.state.status().newest_version
        return None if newest is None else newest.version

    def commit(
        self,
        step: int,
        digest: Digest,
        *,
        t_train_s: float = 1.0,
        scores: tuple[TrajectoryScore, ...] = (),
    ) -> Reply:
        return self.call(
            lambda number: CommitAsked(number, self.ledger.epoch, step, digest, t_train_s, scores)
        )

    def refuse(self, step: int, *groups: GroupId) -> Reply:
        named = tuple((group, "bad") for group in groups)
        return self.call(lambda number: RefuseAsked(number, self.ledger.epoch, step, named))

    def checkpoint(self, step: int) -> Reply:
        return self.call(lambda number: CheckpointAsked(number, self.ledger.epoch, step))

    # --- inside

    def _hello(self, peer: FakePeer, boot_id: str) -> Hello:
        return replace(peer.hello(boot_id), receive_only=peer.name in self.receive_only)

    def _drawn(self, order: DrawPrompt) -> CoordinatorEvent:
        if order.cursor >= self.ends.get(order.task, order.cursor + 1):
            return PromptsEnded(order.cursor, order.task)
        source = Source(order.task, self.rows(order.cursor))
        return PromptDrawn(order.cursor, self._prompt(order.cursor), source)

    def _end_reward(self, order: StepEnvironment) -> float | None:
        return self.reward(order.cursor, order.sample)

    def _reward(self, order: ScoreSample) -> float | None:
        return self.reward(order.cursor, order.sample)

    def _dial_back(self, order: DialBack) -> str:
        return "no answer" if order.peer in self.closed else ""

    def _persist(self, record: CoordinatorRecord) -> None:
        super()._persist(record)
        match record:
            case SampleKept(_, lease, attempt, kept):
                self.kept.add((HeldLease(lease, attempt), kept.sample))
            case TurnKept(_, sample, _, lease, attempt):
                self.kept.add((HeldLease(lease, attempt), sample))
            case BatchFrozen(step, digest, groups):
                self._check_frozen(step, digest, groups)
            case _:
                pass

    def _check_frozen(self, step: int, digest: Digest, groups: tuple[GroupId, ...]) -> None:
        """Frozen groups are whole (I5), fresh, of unrevoked versions (I1), and never in two steps (I4)."""
        size, counts = self.rules.group_size, min if self.rules.over_stale == "mask" else max
        assert len(set(groups)) == self.rules.trajectories_per_step // size
        for group in groups:
            assert self.step_of.setdefault(group, step) == step
            record = self.ledger.groups[group].record
            trajectories = record.trajectories
            samples = [*(trajectory.sample for trajectory in trajectories), *record.left_out]
            task = self.rules.task(self.ledger.groups[group].source.task)
            assert task is not None
            assert sorted(samples) == list(range(self.rules.drawn(task)))
            assert min(self.rules.samples_min, size) <= len(trajectories) <= size
            assert not any(math.isnan(trajectory.reward) for trajectory in trajectories)
            spans = [span for trajectory in trajectories for span in trajectory.spans]
            ages = [step - 1 - span.version for span in spans]
            assert min(ages) >= 0
            assert counts(ages) <= self.rules.staleness_max
            assert not any(
                VersionKey(span.version, span.digest) in self.ledger.revoked for span in spans
            )
        self.digests[step] = digest

    def _perform(self, action: CoordinatorAction) -> None:
        super()._perform(action)
        if isinstance(action, DeleteVersion):
            self.done.append(action)
        elif isinstance(action, Reply):
            self._check_batch(action)

    def _receive(self, peer: FakePeer, message: ToPeer) -> None:
        if isinstance(message, LeaseGranted):
            assert message.version is None or message.version in peer.versions
            self.groups[HeldLease(message.lease, message.attempt)] = message.group
        if isinstance(message, SampleAnswered) and message.accepted:
            key = HeldLease(message.lease, message.attempt)
            durable = (key, message.sample) in self.kept  # I4
            assert durable or kind_of(self.groups[key]) != TRAINING
        super()._receive(peer, message)

    def _root(self, peer: FakePeer, root: Root) -> None:
        if peer.name not in self.slow:
            super()._root(peer, root)

    def _check_batch(self, reply: Reply) -> None:
        """The learner always gets the batch that was frozen (I4)."""
        if isinstance(reply.body, bytes):
            batch: BatchBody = unpack_batch(reply.body)
            assert reply.digest == batch_digest(reply.body) == self.digests[batch.step]
            assert (
                tuple(group.group for group in batch.groups)
                == self.ledger.frozen[batch.step].groups
            )


def train(
    world: World,
    steps: int,
    *,
    start: int = 0,
    kappa: int = 1,
    prefetch: bool = False,
    planned: int = 0,
) -> None:
    """Train as an ideal learner that opens its session first; with ideal workers it never waits for ever."""
    assert world.open_session(start, steps=planned).status == 200
    assert world.publish(start).status == 200
    published = start
    for step in range(start + 1, start + steps + 1):
        request = world.ask_batch(step)
        world.work()
        reply = world.replies.get(request)
        assert reply is not None, f"no batch for step {step}: {world.state.status()}"
        assert reply.status == 200
        assert isinstance(reply.body, bytes)
        assert reply.digest is not None
        if prefetch:
            world.ask_batch(step + 1)
        world.now += 1.0
        world.trained[step] = unpack_batch(reply.body)
        assert world.commit(step, reply.digest).status == 200
        if step - published >= kappa:
            assert world.publish(step).status == 200
            published = step


def publish_step(world: World, step: int) -> None:
    """Train this step, and publish its version."""
    request = world.ask_batch(step)
    world.work()
    digest = world.replies[request].digest
    assert digest is not None
    world.commit(step, digest)
    world.publish(step)


def messages(peer: FakePeer, kind: type) -> list[Any]:
    return [message for message in peer.inbox if isinstance(message, kind)]


def form_of(world: World) -> FormId:
    order: EncodeVersion = messages(world.peers["seed"], EncodeVersion)[-1]
    return order.form


class Kept(World):
    """A world that keeps all records in order."""

    def __init__(self) -> None:
        self.records: list[CoordinatorRecord] = []
        task = replace(
            RULES.tasks[0],
            row_filter=RowFilter(
                retire_after=1,
                retest_after=100,
            ),
        )
        evals = (
            EvalRules(
                TaskRules("held", max_new_tokens=8, stop_token_ids=(1,)),
                rows=2,
                every=1,
                samples=1,
                hold_s=60.0,
                solved_at=1.0,
            ),
        )
        super().__init__(replace(RULES, tasks=(task,), evals=evals))
        self.rows = lambda cursor: f"row {cursor}"
        self.reward = lambda cursor, sample: float(cursor == 5 or sample % 2)

    def _persist(self, record: CoordinatorRecord) -> None:
        super()._persist(record)
        self.records.append(record)
