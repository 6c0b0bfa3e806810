"""Keeps the ledger of a run in memory, as `store.ledger` keeps it on disk.

It takes records and returns `Recovered`. A record that contradicts an earlier one fails an assertion,
where the real ledger has a unique key. As in the real ledger, a drop and a checkpoint delete the rows
that they make useless, and counters never decrease.
"""

from collections.abc import Iterator
from dataclasses import replace

from echo2d.core.audit.events import LimitsLearnt
from echo2d.core.base.ids import Epoch, GroupId, PeerId, PublishSeq
from echo2d.core.broadcast.events import FormChosen, RatesMeasured
from echo2d.core.cluster.earned import EarnedKept, WorkerEarned
from echo2d.core.cluster.events import VersionPublished, VersionRevoked
from echo2d.core.coordinator.events import (
    CheckpointKept,
    CoordinatorRecord,
    EpochOpened,
    Recovered,
    TotalsKept,
)
from echo2d.core.protocol.control_messages import HeldLease, VersionKey
from echo2d.core.protocol.trajectory import GroupRecord, Source, StoredGroup
from echo2d.core.topology.uplink_rates import PeerRate
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


class MemoryLedger:
    """See the module docstring."""

    def __init__(self) -> None:
        self.epoch, self.resume_step, self.checkpoint = Epoch(0), 0, 0
        self.learner, self.steps, self.trained, self.dropped = "", 0, 0, 0
        self.tasks: dict[str, TaskProgress] = {}
        self.evaluated: list[Evaluated] = []
        self.rows: dict[Source, RowJudged] = {}
        self.next_group = 0
        self.given_back: set[tuple[str, int]] = set()
        self.published: dict[int, VersionPublished] = {}
        self.revoked: set[VersionKey] = set()
        self.void: set[int] = set()  # publish_seqs that were revoked
        self.groups: dict[GroupId, StoredGroup] = {}
        self.given: dict[HeldLease, LeaseGiven] = {}
        self.answered: dict[tuple[GroupId, int], AcceptedResult] = {}
        self.turns: dict[tuple[GroupId, int], list[tuple[TurnKept, TurnAnswered | None]]] = {}
        # The samples whose episodes were deleted, and for which no turn was kept since.
        self.forgotten: set[tuple[GroupId, int]] = set()
        self.answered_turns: dict[tuple[GroupId, int, int], AcceptedResult] = {}
        self.frozen: dict[int, BatchFrozen] = {}
        self.committed: dict[int, BatchCommitted] = {}
        self.rates: dict[PeerId, PeerRate] = {}
        self.deliveries: dict[PeerId, WorkerDelivery] = {}
        self.earned: dict[PeerId, WorkerEarned] = {}
        self.form: FormChosen | None = None
        self.limits: dict[str, LimitsLearnt] = {}

    def append(self, record: CoordinatorRecord) -> None:  # noqa: C901 - one case per record
        """Apply one record. AssertionError: it contradicts an earlier one."""
        match record:
            case EpochOpened(epoch, step, learner, steps):
                assert epoch > self.epoch
                self.epoch, self.resume_step = epoch, step
                self.learner, self.steps = learner, steps
            case TotalsKept(trained, dropped):
                assert trained >= self.trained
                assert dropped >= self.dropped
                self.trained, self.dropped = trained, dropped
            case VersionPublished():
                assert record.publish_seq not in self.published
                self.published[record.publish_seq] = record
                self.revoked.discard(VersionKey(record.version, record.digest))
            case VersionRevoked(_, version, digest):
                self.revoked.add(VersionKey(version, digest))
                keys = {(p.version, p.digest): seq for seq, p in self.published.items()}
                self.void.add(keys[version, digest])
                self.void |= {
                    s
                    for s, p in self.published.items()
                    if (p.version, p.digest) == (version, digest)
                }
            case TaskBegun(task, data, texts):
                before = self.tasks.get(task)
                self.tasks[task] = TaskProgress(
                    task, 0 if before is None else before.next_cursor, data, texts
                )
            case RowJudged(source):
                self.rows.pop(source, None)
                if record.groups:
                    self.rows[source] = record
            case PromptTaken(group, cursor, prompt, source, sampling, tags):
                assert group not in self.groups
                self.groups[group] = StoredGroup(
                    GroupRecord(group, prompt, (), (), sampling, tags), cursor, source
                )
                begun = self.tasks.get(source.task, TaskProgress(source.task, 0, b"", b""))
                self.tasks[source.task] = replace(
                    begun, next_cursor=max(begun.next_cursor, cursor + 1)
                )
                self.next_group = group + 1
                self.given_back.discard((source.task, cursor))
            case LeaseGiven(group):
                assert group in self.groups
                assert record.key not in self.given
                self.given[record.key] = record
            case SampleKept(group, lease, attempt, kept, fingerprint):
                stored = self.groups[group]
                self.answered[group, kept.sample] = AcceptedResult(
                    HeldLease(lease, attempt), kept.sample, fingerprint
                )
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
                if turn:
                    self.answered_turns[group, sample, turn] = AcceptedResult(
                        HeldLease(record.lease, record.attempt), sample, record.fingerprint
                    )
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
                del self.answered[group, sample]
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
            case LimitsLearnt(engine_class):
                self.limits[engine_class] = record
            case GroupDropped(group, again=again):
                stored = self.groups.pop(group)
                if again:
                    self.given_back.add((stored.source.task, stored.cursor))
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
            case FormChosen(seq):
                assert seq in self.published
                self.form = record
            case DeliveriesMeasured(workers):
                for worker in workers:
                    self.deliveries.pop(worker.worker, None)
                    self.deliveries[worker.worker] = worker
            case EarnedKept(earned):
                for each in earned:
                    self.earned.pop(each.worker, None)
                    self.earned[each.worker] = each
            case RatesMeasured(rates):
                for rate in rates:
                    self.rates.pop(rate.peer, None)
                    self.rates[rate.peer] = rate

    def _forget_work(self) -> None:
        """Delete the leases and answers of groups that no longer exist."""
        self.given = {key: each for key, each in self.given.items() if each.group in self.groups}
        self.answered = {at: each for at, each in self.answered.items() if at[0] in self.groups}
        self.turns = {at: each for at, each in self.turns.items() if at[0] in self.groups}
        self.answered_turns = {
            at: each for at, each in self.answered_turns.items() if at[0] in self.groups
        }

    def _open_turns(self) -> Iterator[RecoveredTurn]:
        """The last turn of each episode that has not ended."""
        for (group, sample), turns in sorted(self.turns.items()):
            record = self.groups[group].record
            kept = any(each.sample == sample for each in record.trajectories)
            if not kept and sample not in record.left_out:
                before = turns[-2][1] if len(turns) > 1 else None
                yield RecoveredTurn(*turns[-1], None if before is None else before.state)

    def recover(self) -> Recovered:
        """Return what a new coordinator process starts from."""
        return Recovered(
            epoch=self.epoch,
            resume_step=self.resume_step,
            learner=self.learner,
            steps=self.steps,
            trained=self.trained,
            dropped=self.dropped,
            publish_seq=PublishSeq(max(self.published, default=0)),
            published=tuple(
                self.published[seq] for seq in sorted(self.published.keys() - self.void)
            ),
            tasks=tuple(self.tasks[task] for task in sorted(self.tasks)),
            rows=tuple(self.rows.values()),
            given_back=tuple(PromptGivenBack(*each) for each in sorted(self.given_back)),
            evaluated=tuple(self.evaluated),
            next_group=GroupId(self.next_group),
            groups=tuple(self.groups[group] for group in sorted(self.groups)),
            frozen=tuple(self.frozen[step] for step in sorted(self.frozen)),
            committed=tuple(self.committed[step] for step in sorted(self.committed)),
            checkpoint=self.checkpoint,
            given=tuple(self.given.values()),
            answered=(*self.answered_turns.values(), *self.answered.values()),
            turns=tuple(self._open_turns()),
            rates=tuple(self.rates.values()),
            deliveries=tuple(self.deliveries.values()),
            earned=tuple(self.earned.values()),
            form=self.form,
            limits=tuple(self.limits.values()),
        )
