"""The gates of bounded staleness: which group may start, which may enter a batch, which is too old; and the batches.

    groups --(complete)--> buffer --(batch n asked for, G fit, n-1 full)--> batch: full --> committed --> deleted
                             |                                               |   ^            (checkpoint)
                             +--> too old for batch n: leaves        refused +---+ refilled

Symbols (docs/design/staleness.md): S staleness_max, G groups per step, n the lowest step whose batch is not full
(`open_step`), q groups buffered, in flight, or held by batches >= n, c the last step committed in this epoch.

A group that is meant for step m may be started by a worker serving version w if (m - 1) - w <= S. The next group is
meant for the first place that is still free when all q groups have theirs: m = n + q // G, unless a refusal has opened
batch n below full ones, whose places are not counted (else replaying a long run could wait for ever).
A group may enter batch n if 0 <= (n - 1) - v <= S for the version v that counts: the oldest of its tokens, with "mask"
the newest (the learner masks older ones); no token may be newer than n - 1 either way.

Kept true: no group is in two places; a full batch keeps its bytes until a group of it is refused (I4, I5); n and the
buffer fit together: nothing buffered is too old for batch n. Not here: leases, replies, and what is persisted when.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from echo2d.core.base.ids import Digest, GroupId, Version
from echo2d.core.cluster.rules import RunRules
from echo2d.core.protocol.control_messages import VersionKey
from echo2d.core.protocol.trajectory import (
    BatchBody,
    GroupRecord,
    StoredGroup,
    batch_digest,
    join_batch,
    pack_batch,
    pack_group,
)
from echo2d.core.rollouts.events import BatchFrozen, RecoveredRollouts
from echo2d.errors import IntegrityFault

PREFETCH_STEPS = 2  # batch c + 1 is being trained on, batch c + 2 may be fetched meanwhile
REFUSALS_MAX = (
    5  # of one step in one session; then something is wrong that other groups do not mend
)
FROZEN_MAX = (
    1024  # batches kept for a learner that restarts; more without a checkpoint are not given out
)


@dataclass(slots=True)
class StepBatch:
    """The batch of one step. digest: of its bytes while it is full, else None; reasons: of refusals in this session."""

    step: int
    size: int
    groups: list[StoredGroup] = field(default_factory=list)
    digest: Digest | None = None
    refusals: int = 0
    reasons: list[str] = field(default_factory=list)
    packed: bytes | None = (
        None  # what `body` returns, while the batch is the one that was filled last
    )

    @property
    def missing(self) -> int:
        return self.size - len(self.groups)

    def body(self) -> bytes:
        """The bytes of a full batch; always the same ones."""
        assert self.missing == 0
        if self.packed is not None:
            return self.packed
        return pack_batch(BatchBody(self.step, tuple(group.record for group in self.groups)))

    def frozen(self) -> BatchFrozen:
        assert self.digest is not None
        return BatchFrozen(
            self.step,
            self.digest,
            tuple(group.record.group for group in self.groups),
            self.refusals,
        )


class Staleness:
    """See the module docstring. `in_flight`: admitted groups that are not complete yet; the caller counts them."""

    def __init__(self, rules: RunRules, recovered: RecoveredRollouts) -> None:
        self._bound = rules.staleness_max
        self._per_step = rules.trajectories_per_step // rules.group_size
        self._mask = rules.over_stale == "mask"
        self._resume_step = recovered.resume_step
        self._buffer: dict[GroupId, StoredGroup] = {}
        self._packed: dict[
            GroupId, bytes
        ] = {}  # the groups of the buffer, so that a batch freezes fast
        self._ages: dict[
            GroupId, tuple[Version, Version]
        ] = {}  # likewise: the version that counts, the newest one
        self._batches: dict[int, StepBatch] = {}
        self._last_full = StepBatch(0, 0)  # it keeps its bytes, for whoever asked for it
        self.checkpoint = recovered.checkpoint
        mine = [commit.step for commit in recovered.committed if commit.epoch == recovered.epoch]
        self.committed = max([recovered.resume_step, recovered.checkpoint, *mine])
        self.ever_committed = max(
            [self.committed, *(commit.step for commit in recovered.committed)]
        )
        stored = {group.record.group: group for group in recovered.groups}
        for frozen in recovered.frozen:
            self._batches[frozen.step] = _recovered_batch(frozen, stored)
        self.open_step = self._lowest_open()  # n

    # --- the numbers

    @property
    def buffered(self) -> int:
        return len(self._buffer)

    @property
    def crowded(self) -> bool:
        """No batch freezes until the learner reports a checkpoint."""
        return len(self._batches) >= FROZEN_MAX

    @property
    def newest_step(self) -> int:
        """The last step that any learner can have behind it: all batches up to it were given out, or committed."""
        return max(self.ever_committed, self.open_step - 1)

    @property
    def oldest(self) -> Version:
        """The oldest version whose tokens may still enter batch n."""
        return Version(max(0, self.open_step - 1 - self._bound))

    def queued(self, in_flight: int) -> int:
        """q."""
        held = sum(
            len(batch.groups) for step, batch in self._batches.items() if step >= self.open_step
        )
        return len(self._buffer) + in_flight + held

    def next_step(self, in_flight: int) -> int:
        """m: the step the next group is meant for."""
        step, ahead = self.open_step, len(self._buffer) + in_flight
        while ahead >= (places := self._places(step)):
            ahead -= places
            step += 1
        return step

    def oldest_start(self, in_flight: int) -> Version:
        """Gate 1: the oldest version that a worker may serve to start the next group."""
        return Version(max(0, self.next_step(in_flight) - 1 - self._bound))

    def outdated(self, oldest: Version, newest: Version | None) -> bool:
        """Gate 2: no batch from n on can take a group with these token versions (newest None: it may still grow)."""
        counts = newest if self._mask else oldest
        return counts is not None and counts < self.oldest

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
        """Buffer a complete group; False: it is too old already."""
        age = self._age_of(group.record)
        if age[0] < self.oldest:
            return False
        self._buffer[group.record.group] = group
        self._packed[group.record.group] = pack_group(group.record)
        self._ages[group.record.group] = age
        return True

    def freeze(self, asked_step: int) -> StepBatch | None:
        """Gate 3: fill batch n if it has been asked for and enough groups fit, those first that age first."""
        step = self.open_step
        if step > asked_step or (self.crowded and step not in self._batches):
            return None
        batch = self._batches.get(step) or StepBatch(step, self._per_step)
        if len(self._buffer) < batch.missing:
            return None
        fitting = [
            (counts, group)
            for group, (counts, newest) in self._ages.items()
            if step - 1 - counts <= self._bound and newest <= step - 1
        ]
        if len(fitting) < batch.missing:
            return None
        for _, group in sorted(fitting)[: batch.missing]:
            batch.groups.append(self._buffer.pop(group))
            del self._ages[group]
        batch.groups.sort(key=lambda group: group.record.group)
        self._last_full.packed = None
        self._last_full, batch.packed = (
            batch,
            join_batch(step, [self._take_packed(group) for group in batch.groups]),
        )
        batch.digest = batch_digest(batch.packed)
        self._batches[step] = batch
        self.open_step = self._lowest_open()
        return batch

    def age(self) -> list[StoredGroup]:
        """Take out of the buffer what batch n cannot take any more."""
        oldest = self.oldest
        return self._take_out(group for group, (counts, _) in self._ages.items() if counts < oldest)

    def refuse(
        self, step: int, refused: Mapping[GroupId, str], void: Callable[[GroupRecord], bool]
    ) -> list[StoredGroup]:
        """Open a full, uncommitted batch again without these groups of it, and without those that are void."""
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

    def revoke(self, keys: Collection[VersionKey]) -> list[StoredGroup]:
        """Take out of the buffer and of open batches what one of these versions wrote; full batches stay."""
        out = self._take_out(g.record.group for g in self._buffer.values() if g.record.uses(keys))
        for batch in self._batches.values():
            if batch.digest is None:
                out += [group for group in batch.groups if group.record.uses(keys)]
                batch.groups = [group for group in batch.groups if not group.record.uses(keys)]
        return out

    def resume(self, step: int) -> tuple[list[StepBatch], list[StoredGroup]]:
        """A new epoch begins after `step`: the full batches it commits thereby, what open ones held."""
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
        """The optimizer step on full batch c + 1 was applied. Whether it is the first time in any epoch."""
        assert step == self.committed + 1
        assert self._full(step)
        first = step > self.ever_committed
        self.committed = step
        self.ever_committed = max(self.ever_committed, step)
        return first

    def keep_checkpoint(self, step: int) -> None:
        """Steps <= step <= c are durable at the learner."""
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

    def _places(self, step: int) -> int:
        """How many groups the batch of this step can still take."""
        batch = self._batches.get(step)
        return self._per_step if batch is None else batch.missing

    def _full(self, step: int) -> bool:
        batch = self._batches.get(step)
        return batch is not None and batch.digest is not None

    def _age_of(self, group: GroupRecord) -> tuple[Version, Version]:
        newest = group.version_max
        return newest if self._mask else group.version_min, newest

    def _take_packed(self, group: StoredGroup) -> bytes:
        """Of a group that was in the buffer, or of one that stayed when others were refused."""
        packed = self._packed.pop(group.record.group, None)
        return pack_group(group.record) if packed is None else packed

    def _take_out(self, groups: Iterable[GroupId]) -> list[StoredGroup]:
        out = [self._buffer.pop(group) for group in list(groups)]
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
    """A batch as the ledger has it; one that lacks groups had them refused after it was frozen, and is open."""
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
