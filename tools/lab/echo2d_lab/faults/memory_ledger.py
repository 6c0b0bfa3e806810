"""The ledger of a simulated run: the real one in memory, and books of what it holds that the invariants compare.

A coordinator process starts from the real ledger (`recover`). A record that contradicts an earlier one fails an
assertion of the books, or a unique key of the ledger. Both delete the data that a drop or a checkpoint makes useless.
"""

from dataclasses import replace

from echo2d.core.base.ids import Epoch, GroupId
from echo2d.core.cluster.events import VersionPublished, VersionRevoked
from echo2d.core.coordinator.events import (
    CheckpointKept,
    CoordinatorRecord,
    EpochOpened,
    Recovered,
)
from echo2d.core.protocol.control_messages import HeldLease, VersionKey
from echo2d.core.protocol.trajectory import GroupRecord, StoredGroup
from echo2d.core.work.evaluation.events import Evaluated
from echo2d.core.work.events import (
    BatchCommitted,
    BatchFrozen,
    EpisodeForgotten,
    GroupDropped,
    LeaseGiven,
    PromptTaken,
    SampleKept,
    SampleLeftOut,
    SampleReturned,
    SampleRewarded,
    TurnAnswered,
    TurnKept,
)
from echo2d.store.ledger import Ledger


class MemoryLedger:
    """See the module docstring."""

    def __init__(self) -> None:
        self._ledger = Ledger.in_memory()
        self.epoch, self.resume_step, self.checkpoint = Epoch(0), 0, 0
        self.evaluated: list[Evaluated] = []
        self.published: dict[int, VersionPublished] = {}
        self.revoked: set[VersionKey] = set()
        self.groups: dict[GroupId, StoredGroup] = {}
        self.given: dict[HeldLease, LeaseGiven] = {}
        self.turns: dict[tuple[GroupId, int], list[tuple[TurnKept, TurnAnswered | None]]] = {}
        # The samples whose episodes were deleted, and for which no turn was kept since.
        self.forgotten: set[tuple[GroupId, int]] = set()
        self.frozen: dict[int, BatchFrozen] = {}
        self.committed: dict[int, BatchCommitted] = {}

    def recover(self) -> Recovered:
        """What a new coordinator process starts from."""
        return self._ledger.recover()

    def append(self, record: CoordinatorRecord) -> None:
        """Keep one record. AssertionError: it contradicts an earlier one."""
        self._note(record)
        self._ledger.append([record])

    def _note(self, record: CoordinatorRecord) -> None:  # noqa: C901 - one case per record
        match record:
            case EpochOpened(epoch, step):
                assert epoch > self.epoch
                self.epoch, self.resume_step = epoch, step
            case VersionPublished():
                assert record.publish_seq not in self.published
                self.published[record.publish_seq] = record
                self.revoked.discard(VersionKey(record.version, record.digest))
            case VersionRevoked(_, version, digest):
                self.revoked.add(VersionKey(version, digest))
            case PromptTaken(group, cursor, prompt, source, sampling, tags):
                assert group not in self.groups
                self.groups[group] = StoredGroup(
                    GroupRecord(group, prompt, (), (), sampling, tags), cursor, source
                )
            case LeaseGiven(group):
                assert group in self.groups
                assert record.key not in self.given
                self.given[record.key] = record
            case SampleKept(group, _, _, kept):
                stored = self.groups[group]
                assert kept.sample not in {each.sample for each in stored.record.trajectories}
                both = sorted((*stored.record.trajectories, kept), key=lambda each: each.sample)
                self.groups[group] = replace(
                    stored, record=replace(stored.record, trajectories=tuple(both))
                )
            case TurnKept(group, sample, turn):
                assert group in self.groups
                turns = self.turns.setdefault((group, sample), [])
                last = turns[-1][0].turn if turns else min(0, turn - 1)
                assert turn == last + 1, "a turn is lost or counted twice"
                self.forgotten.discard((group, sample))
                assert all(answered for _, answered in turns), "the environment did not answer"
                turns.append((record, None))
            case TurnAnswered(group, sample, turn):
                turns = self.turns[group, sample]
                assert turn == turns[-1][0].turn, "an older turn is answered"
                assert turns[-1][1] is None, "a turn is answered twice"
                turns[-1] = turns[-1][0], record
            case EpisodeForgotten(group, sample):
                self.turns.pop((group, sample), None)
                self.forgotten.add((group, sample))
            case SampleRewarded(group, sample, reward, parts):
                stored = self.groups[group]
                scored = [
                    t.scored(reward, parts) if t.sample == sample else t
                    for t in stored.record.trajectories
                ]
                self.groups[group] = replace(
                    stored, record=replace(stored.record, trajectories=tuple(scored))
                )
            case SampleReturned(group, sample):
                stored = self.groups[group]
                self.turns.pop((group, sample), None)
                left = tuple(t for t in stored.record.trajectories if t.sample != sample)
                assert len(left) == len(stored.record.trajectories) - 1
                self.groups[group] = replace(
                    stored, record=replace(stored.record, trajectories=left)
                )
            case SampleLeftOut(group, sample):
                stored = self.groups[group]
                assert sample not in stored.record.left_out
                left = tuple(t for t in stored.record.trajectories if t.sample != sample)
                left_out = tuple(sorted((*stored.record.left_out, sample)))
                self.groups[group] = replace(
                    stored, record=replace(stored.record, trajectories=left, left_out=left_out)
                )
            case Evaluated():
                self.evaluated.append(record)
            case GroupDropped(group):
                self.groups.pop(group)
                self._forget_work()
            case BatchFrozen(step):
                self.frozen[step] = record
            case BatchCommitted(step):
                self.committed[step] = record
            case CheckpointKept(step):
                for frozen in [each for each in self.frozen.values() if each.step <= step]:
                    for group in frozen.groups:
                        self.groups.pop(group, None)
                    del self.frozen[frozen.step]
                self.committed = {s: each for s, each in self.committed.items() if s > step}
                self.checkpoint = step
                self._forget_work()

    def _forget_work(self) -> None:
        """Delete the leases and turns of groups that no longer exist."""
        self.given = {key: each for key, each in self.given.items() if each.group in self.groups}
        self.turns = {at: each for at, each in self.turns.items() if at[0] in self.groups}
