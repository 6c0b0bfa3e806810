"""The gates of bounded staleness (I1): which group may start, and which batch it may enter.

    groups --complete--> buffer --G fit batch n--> batch n is full --> committed --> deleted
                           |                          refused |  ^          (after a checkpoint)
                           +--> too old for batch n           +--+ refilled

Symbols (docs/design/staleness.md): S: staleness_max. G: groups per step. n: the lowest step whose
batch is not full (`open_step`). q: groups that are buffered, in flight, or held by batches >= n. c:
the last step committed in this epoch.

Gate 1. A worker that serves version w may start a group meant for step m if (m - 1) - w <= S. The
next group is meant for the first free place after all q groups have theirs: m = n + q // G. With
several tasks q and G are those of the group's task, which has places of its own in each step (`Quotas`).
Full batches above n have no free places, so they are skipped (a batch above n is full if a refusal has reopened an
earlier one). If their places counted, the replay of a long run could wait forever.
Gates 2 and 3. A group may enter batch n if 0 <= (n - 1) - v <= S. v is the oldest version of its
tokens; with over_stale "mask", where the learner masks the older tokens, it is the newest. No token
may be newer than n - 1. Of the groups that may enter, the oldest are taken first, or those with the
highest priority (`batch_order`).

Invariant: no group is in two places; a full batch keeps its bytes until one of its groups is refused
(I4, I5); no buffered group is too old for batch n.
Not here: leases, replies, and what is persisted when.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from echo2d.core.base.ids import Digest, GroupId, Version
from echo2d.core.protocol.trajectory import (
    BatchBody,
    GroupRecord,
    StoredGroup,
    batch_digest,
    join_batch,
    pack_batch,
    pack_group,
)
from echo2d.core.rules.run import RunRules
from echo2d.core.rules.tasks import TaskRules
from echo2d.core.work.events import BatchFrozen, RecoveredRollouts
from echo2d.core.work.training.batch_order import Fitting, Quotas, by_priority
from echo2d.core.work.training.contrast import spread
from echo2d.errors import IntegrityFault

# While the learner trains on batch c + 1, it may fetch batch c + 2.
PREFETCH_STEPS = 2
# After this many refusals of one step in one session, something is wrong that other groups cannot repair.
REFUSALS_MAX = 5
# This many batches are kept for a learner that restarts. Then no batch is given out before a checkpoint.
FROZEN_MAX = 1024


@dataclass(slots=True)
class StepBatch:
    """The batch of one step."""

    step: int
    size: int
    groups: list[StoredGroup] = field(default_factory=list)
    digest: Digest | None = None  # of its bytes while it is full, else None
    refusals: int = 0
    reasons: list[str] = field(default_factory=list)  # one text for each refusal of this session
    # The batch's bytes; only the batch that was filled last keeps them.
    packed: bytes | None = None

    @property
    def missing(self) -> int:
        """How many groups the batch still lacks."""
        return self.size - len(self.groups)

    def of_task(self, task: str) -> int:
        """How many groups of the batch belong to this task."""
        return sum(group.source.task == task for group in self.groups)

    def body(self) -> bytes:
        """The bytes of a full batch, the same ones at every call."""
        assert self.missing == 0
        if self.packed is not None:
            return self.packed
        return pack_batch(BatchBody.of(self.step, [group.record for group in self.groups]))

    def frozen(self) -> BatchFrozen:
        """The record of a full batch's composition."""
        assert self.digest is not None
        return BatchFrozen(
            self.step,
            self.digest,
            tuple(group.record.group for group in self.groups),
            self.refusals,
        )


class NextGroup(NamedTuple):
    """The next group of this task is meant for step m (`step`), and may start at workers of version
    `oldest` or a newer one (gate 1).
    """

    task: TaskRules
    step: int
    oldest: Version


class Staleness:
    """See the module docstring.

    `in_flight`: how many admitted groups of each task are not complete yet; the caller counts them. Without these
    numbers, priority may lose groups.
    """

    def __init__(self, rules: RunRules, recovered: RecoveredRollouts) -> None:
        self._bound = rules.staleness_max
        self._per_step = rules.groups_per_step
        self._tasks = rules.tasks
        self._quotas = Quotas([task.weight for task in rules.tasks], rules.groups_per_step)
        self._mask = rules.over_stale == "mask"
        self._oldest_first = rules.order == "oldest"
        self._resume_step = recovered.resume_step
        self._buffer: dict[GroupId, StoredGroup] = {}
        # The number of buffered groups of each task.
        self._by_task: Counter[str] = Counter()
        # Buffered groups are packed and dated when they come, so that a batch is filled fast.
        self._packed: dict[GroupId, bytes] = {}
        # For each group: the version that counts for the gates, and the newest version.
        self._ages: dict[GroupId, tuple[Version, Version]] = {}
        self._batches: dict[int, StepBatch] = {}
        # The batch that was filled last keeps its bytes, because the learner is about to fetch it.
        self._last_full = StepBatch(0, 0)
        self.checkpoint = recovered.checkpoint
        mine = [commit.step for commit in recovered.committed if commit.epoch == recovered.epoch]
        self.committed = max([recovered.resume_step, recovered.checkpoint, *mine])
        self.ever_committed = max(
            [self.committed, *(commit.step for commit in recovered.committed)]
        )
        stored = {group.record.group: group for group in recovered.groups}
        for frozen in recovered.frozen:
            self._batches[frozen.step] = _recovered_batch(frozen, stored)
        # This is n of the module docstring.
        self.open_step = self._lowest_open()

    # --- the numbers

    @property
    def buffered(self) -> int:
        return len(self._buffer)

    @property
    def crowded(self) -> bool:
        """Whether no batch is filled until the learner reports a checkpoint."""
        return len(self._batches) >= FROZEN_MAX

    @property
    def newest_step(self) -> int:
        """The last step that any learner can have done: its batch was given out or committed."""
        return max(self.ever_committed, self.open_step - 1)

    @property
    def oldest(self) -> Version:
        """The oldest version whose tokens may still enter batch n."""
        return Version(max(0, self.open_step - 1 - self._bound))

    def queued(self, in_flight: int) -> int:
        """q: the groups buffered, in flight, or held by batches from n on."""
        held = sum(
            len(batch.groups) for step, batch in self._batches.items() if step >= self.open_step
        )
        return len(self._buffer) + in_flight + held

    def next_groups(self, in_flight: Mapping[str, int]) -> list[NextGroup]:
        """The next group of each task; the one that the open steps lack most comes first."""
        # A single task needs no sort: groups begin hundreds of times a second.
        if len(self._tasks) == 1:
            return [self._next_group(0, in_flight)[-1]]
        found = [self._next_group(number, in_flight) for number in range(len(self._tasks))]
        return [group for *_, group in sorted(found)]

    def lacking(self, task: str) -> int:
        """How many of the task's groups batch n lacks, besides those that are buffered."""
        number = next(at for at, each in enumerate(self._tasks) if each.name == task)
        return max(0, self._places(self.open_step, number) - self._by_task[task])

    @property
    def missing(self) -> int:
        """How many groups batch n lacks, besides those that are buffered."""
        return sum(self.lacking(task.name) for task in self._tasks)

    def outdated(self, oldest: Version, newest: Version | None) -> bool:
        """Gate 2: whether no batch from n on can take a group with these token versions.

        newest: None: the group's newest version is not known yet.
        """
        counts = newest if self._mask else oldest
        return counts is not None and counts < self.oldest

    def is_last_step(self, oldest: Version, newest: Version) -> bool:
        """Whether no batch above n can take a group with these token versions."""
        return (newest if self._mask else oldest) + 1 + self._bound <= self.open_step

    def batch(self, step: int) -> StepBatch | None:
        """The batch of this step if it is full."""
        return self._batches[step] if self._full(step) else None

    def held(self) -> frozenset[GroupId]:
        """The groups in batches, full or open."""
        return frozenset(
            group.record.group for batch in self._batches.values() for group in batch.groups
        )

    # --- what happens

    def admit(self, group: StoredGroup) -> bool:
        """Buffer a complete group. False: it is already too old, and not buffered."""
        age = self._age_of(group.record)
        if age[0] < self.oldest:
            return False
        self._buffer[group.record.group] = group
        self._by_task[group.source.task] += 1
        self._packed[group.record.group] = pack_group(group.record)
        self._ages[group.record.group] = age
        return True

    def may_freeze(self, asked_step: int) -> bool:
        """Whether batch n has been asked for, and as many groups are buffered as it lacks."""
        step, batch = self.open_step, self._batches.get(self.open_step)
        if step > asked_step or (batch is None and self.crowded):
            return False
        return len(self._buffer) >= (self._per_step if batch is None else batch.missing)

    def freeze(
        self, asked_step: int, in_flight: Mapping[str, int] = MappingProxyType({})
    ) -> StepBatch | None:
        """Gate 3: fill batch n if it has been asked for and enough groups fit."""
        if not self.may_freeze(asked_step):
            return None
        step = self.open_step
        batch = self._batches.get(step) or StepBatch(step, self._per_step)
        chosen: list[GroupId] = []
        for number, task in enumerate(self._tasks):
            chosen += self._first(step, number, in_flight.get(task.name, 0))
        if len(chosen) < batch.missing:
            return None
        # A task may have more groups than its share in a batch from before its weight was changed.
        for group in chosen[: batch.missing]:
            batch.groups.append(self._take(group))
            del self._ages[group]
        batch.groups.sort(key=lambda group: group.record.group)
        self._last_full.packed = None
        trajectories = sum(len(group.record.trajectories) for group in batch.groups)
        packed = [self._take_packed(group) for group in batch.groups]
        self._last_full, batch.packed = batch, join_batch(step, trajectories, packed)
        batch.digest = batch_digest(batch.packed)
        self._batches[step] = batch
        self.open_step = self._lowest_open()
        return batch

    def age(self) -> list[StoredGroup]:
        """Remove and return the buffered groups that batch n can no longer take."""
        oldest = self.oldest
        return self._take_out(group for group, (counts, _) in self._ages.items() if counts < oldest)

    def refuse(
        self, step: int, refused: Mapping[GroupId, str], void: Callable[[GroupRecord], bool]
    ) -> list[StoredGroup]:
        """Reopen a full, uncommitted batch; return the groups that leave it.

        They are the refused ones (group: reason), which must be in the batch, and those for which `void` is
        true, such as groups that a revoked version wrote.
        """
        batch = self._batches[step]
        assert batch.digest is not None
        assert step > self.committed
        out = [
            group for group in batch.groups if group.record.group in refused or void(group.record)
        ]
        assert len(out) >= len(refused) > 0
        batch.groups = [group for group in batch.groups if group not in out]
        batch.digest = batch.packed = None
        batch.refusals += 1
        batch.reasons.append("; ".join(dict.fromkeys(refused.values())))
        self.open_step = self._lowest_open()
        return out

    def withdraw(self, void: Callable[[GroupRecord], bool]) -> list[StoredGroup]:
        """Remove the groups for which `void` is true from the buffer and from open batches, and return them.

        Full batches stay as they are.
        """
        out = self._take_out(g.record.group for g in self._buffer.values() if void(g.record))
        for batch in self._batches.values():
            if batch.digest is None:
                out += [group for group in batch.groups if void(group.record)]
                batch.groups = [group for group in batch.groups if not void(group.record)]
        return out

    def resume(self, step: int) -> tuple[list[StepBatch], list[StoredGroup]]:
        """Begin a new epoch after `step`: all steps up to it count as committed.

        Returns the full batches up to `step`, and the groups of the open ones, which are removed from them.
        """
        assert self.checkpoint <= step <= self.newest_step
        passed = [self._batches[each] for each in sorted(self._batches) if each <= step]
        opened = [batch for batch in passed if batch.digest is None]
        for batch in opened:
            del self._batches[batch.step]
        for batch in self._batches.values():
            batch.reasons.clear()
        self._resume_step = self.committed = step
        self.ever_committed = max(self.ever_committed, step)
        self.open_step = self._lowest_open()
        return [batch for batch in passed if batch.digest is not None], [
            g for batch in opened for g in batch.groups
        ]

    def commit(self, step: int) -> bool:
        """Record that the learner has trained on full batch c + 1. Returns whether this is the first time."""
        assert step == self.committed + 1
        assert self._full(step)
        first = step > self.ever_committed
        self.committed = step
        self.ever_committed = max(self.ever_committed, step)
        return first

    def keep_checkpoint(self, step: int) -> None:
        """Delete the batches of all steps up to this one, because the learner's checkpoint has them."""
        assert self.checkpoint <= step <= self.committed
        self.checkpoint = step
        self._batches = {each: batch for each, batch in self._batches.items() if each > step}
        self.open_step = self._lowest_open()

    # --- inside

    def _lowest_open(self) -> int:
        step = max(self._resume_step, self.checkpoint) + 1
        while self._full(step):
            step += 1
        return step

    def _places(self, step: int, task: int) -> int:
        """How many groups of the task with this number the batch of this step can still take."""
        quota, batch = self._quotas.of(step)[task], self._batches.get(step)
        if batch is None:
            return quota
        its_own = batch.of_task(self._tasks[task].name)
        return max(0, quota - its_own) if batch.missing else 0

    def _first(self, step: int, task: int, in_flight: int) -> list[GroupId]:
        """The groups of this task for its places in batch n, chosen from those that may enter it."""
        fitting: list[Fitting] = []
        later: list[int] = []
        for group, (counts, newest) in self._ages.items():
            stored, last_step = self._buffer[group], counts + 1 + self._bound
            if stored.source.task != self._tasks[task].name:
                continue
            if step <= last_step and newest <= step - 1:
                rewards = (
                    [] if self._oldest_first else [t.reward for t in stored.record.trajectories]
                )
                fitting.append(Fitting(last_step, spread(rewards), group))
            else:
                later.append(last_step)
        places = self._places(step, task)
        if self._oldest_first:
            return [each.group for each in sorted(fitting)[:places]]

        def room(last_step: int) -> int:
            steps = range(step + 1, last_step + 1)
            return sum(self._places(each, task) for each in steps) - in_flight

        return by_priority(fitting, later, places, room)

    def _next_group(
        self, task: int, in_flight: Mapping[str, int]
    ) -> tuple[int, float, int, NextGroup]:
        """Returns (m, how full the task's share of step m is, task, its next group)."""
        rules = self._tasks[task]
        name = rules.name
        step, ahead = self.open_step, self._by_task[name] + in_flight.get(name, 0)
        alone = len(self._tasks) == 1
        while True:
            untouched = alone and step not in self._batches
            places = self._per_step if untouched else self._places(step, task)
            if ahead < places:
                group = NextGroup(rules, step, Version(max(0, step - 1 - self._bound)))
                return step, ahead / places, task, group
            ahead -= places
            step += 1

    def _take(self, group: GroupId) -> StoredGroup:
        stored = self._buffer.pop(group)
        self._by_task[stored.source.task] -= 1
        return stored

    def _full(self, step: int) -> bool:
        batch = self._batches.get(step)
        return batch is not None and batch.digest is not None

    def _age_of(self, group: GroupRecord) -> tuple[Version, Version]:
        newest = group.version_max
        return newest if self._mask else group.version_min, newest

    def _take_packed(self, group: StoredGroup) -> bytes:
        """The group's bytes. A group that stayed in a refused batch has to be packed again."""
        packed = self._packed.pop(group.record.group, None)
        return pack_group(group.record) if packed is None else packed

    def _take_out(self, groups: Iterable[GroupId]) -> list[StoredGroup]:
        out = [self._take(group) for group in list(groups)]
        for group in out:
            del self._packed[group.record.group], self._ages[group.record.group]
        return out

    def check(self) -> None:
        buffered, held = (
            set(self._buffer),
            [g.record.group for b in self._batches.values() for g in b.groups],
        )
        assert len(held) == len(set(held)), "a group is in two batches"
        assert not buffered & set(held)
        assert buffered == set(self._packed)
        assert +self._by_task == Counter(each.source.task for each in self._buffer.values())
        assert self._ages == {
            group: self._age_of(stored.record) for group, stored in self._buffer.items()
        }
        assert len(self._batches) <= FROZEN_MAX
        assert self.checkpoint <= self.committed <= self.ever_committed
        for step, batch in self._batches.items():
            assert self.checkpoint < step == batch.step
            assert (batch.digest is None) == (batch.missing > 0)
            assert len(batch.reasons) <= batch.refusals
            assert batch.packed is None or (
                batch is self._last_full and batch.digest == batch_digest(batch.packed)
            )
        assert self.open_step == self._lowest_open()
        assert not any(
            self.outdated(g.record.version_min, g.record.version_max) for g in self._buffer.values()
        )


def _recovered_batch(frozen: BatchFrozen, stored: dict[GroupId, StoredGroup]) -> StepBatch:
    """A batch from the ledger. If groups are missing, they were refused after it was frozen: it is open again."""
    groups = [stored[group] for group in frozen.groups if group in stored]
    batch = StepBatch(frozen.step, len(frozen.groups), groups, None, frozen.refusals)
    if batch.missing:
        batch.refusals += 1
        return batch
    batch.digest = batch_digest(batch.body())
    if batch.digest != frozen.digest:
        raise IntegrityFault(
            f"the ledger's groups of batch {frozen.step} are not those that were frozen"
        )
    return batch
