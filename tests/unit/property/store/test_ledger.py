"""Any order of records: the ledger agrees with a plain-Python model, before and after it is opened again."""

import math
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from echo2d.core.base.ids import Digest, Epoch, GroupId, LeaseId, PeerId, PublishSeq, Version
from echo2d.core.broadcast.events import RatesMeasured
from echo2d.core.cluster.events import VersionPublished, VersionRevoked
from echo2d.core.coordinator.events import CheckpointKept, CoordinatorRecord, EpochOpened, Recovered
from echo2d.core.protocol.control_messages import HeldLease, VersionKey
from echo2d.core.protocol.trajectory import (
    NOTHING,
    AuthoredSpan,
    GroupRecord,
    Partial,
    StoredGroup,
    TrajectoryRecord,
)
from echo2d.core.rollouts.events import (
    AcceptedResult,
    BatchCommitted,
    BatchFrozen,
    GroupDropped,
    LeaseGiven,
    PromptGivenBack,
    PromptTaken,
    SampleKept,
    SampleRewarded,
    TaskProgress,
)
from echo2d.core.topology.uplink_rates import PeerRate
from echo2d.store.ledger import Ledger

DIGESTS = st.sampled_from([Digest(bytes([n]) * 32) for n in range(3)])
SMALL = st.integers(0, 4)
TOKENS = st.sampled_from([b"", bytes(4), bytes(range(8))])
UNSCORED = -1.0  # NaN is not equal to itself


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "ledger.sqlite"
        self.ledger = Ledger.open(self.path)
        self.model = Recovered.nothing()
        self.waiting: list[CoordinatorRecord] = []
        self.given: list[LeaseGiven] = []
        self.answered: list[tuple[GroupId, AcceptedResult]] = []

    def teardown(self) -> None:
        self.ledger.close()
        self.folder.cleanup()

    def put(self, record: CoordinatorRecord, **changes: object) -> None:
        self.waiting.append(record)
        self.model = replace(self.model, **changes)  # type: ignore[arg-type]

    def change_groups(
        self, change: Callable[[StoredGroup], StoredGroup | None]
    ) -> tuple[StoredGroup, ...]:
        return tuple(kept for stored in self.model.groups if (kept := change(stored)) is not None)

    @rule(resume_step=SMALL)
    def open_epoch(self, resume_step: int) -> None:
        epoch = Epoch(self.model.epoch + 1)
        self.put(EpochOpened(epoch, resume_step), epoch=epoch, resume_step=resume_step)

    @rule(version=SMALL, digest=DIGESTS)
    def publish(self, version: int, digest: Digest) -> None:
        seq = PublishSeq(self.model.publish_seq + 1)
        record = VersionPublished(seq, self.model.epoch, Version(version), digest, f"v{seq}", 1)
        self.put(record, publish_seq=seq, published=(*self.model.published, record))

    @rule(version=SMALL, digest=DIGESTS)
    def revoke(self, version: int, digest: Digest) -> None:
        published = tuple(
            item
            for item in self.model.published
            if (item.version, item.digest) != (version, digest)
        )
        self.put(VersionRevoked(self.model.epoch, Version(version), digest), published=published)

    @rule(skipped=SMALL, prompt=TOKENS)
    def take_prompt(self, skipped: int, prompt: bytes) -> None:
        group, cursor = GroupId(self.model.next_group + skipped), self.model.next_cursor("")
        stored = StoredGroup(GroupRecord(group, prompt, ()), cursor)
        self.put(
            PromptTaken(group, cursor, prompt),
            groups=(*self.model.groups, stored), next_group=group + 1,
            tasks=(TaskProgress("", cursor + 1, b"", b""),),
        )  # fmt: skip

    @precondition(lambda self: self.model.groups)
    @rule(data=st.data(), lease=SMALL, digest=DIGESTS, tokens=TOKENS)
    def keep_sample(self, data: st.DataObject, lease: int, digest: Digest, tokens: bytes) -> None:
        record = data.draw(st.sampled_from(self.model.groups)).record
        kept = TrajectoryRecord(
            len(record.trajectories),
            tokens,
            tokens,
            (AuthoredSpan(0, 1, Version(1), digest, PeerId("p")),),
            "length",
        )
        fingerprint = b"%d" % len(self.answered)
        self.answered.append(
            (record.group, AcceptedResult(HeldLease(LeaseId(lease), 0), kept.sample, fingerprint))
        )
        grown = replace(record, trajectories=(*record.trajectories, replace(kept, reward=UNSCORED)))
        self.put(
            SampleKept(record.group, LeaseId(lease), 0, kept, fingerprint),
            groups=self.change_groups(
                lambda s: replace(s, record=grown) if s.record.group == record.group else s
            ),
        )

    @precondition(lambda self: self.model.groups)
    @rule(data=st.data(), lease=SMALL, digest=DIGESTS, tokens=TOKENS)
    def give_lease(self, data: st.DataObject, lease: int, digest: Digest, tokens: bytes) -> None:
        group = data.draw(st.sampled_from(self.model.groups)).record.group
        base = (
            Partial(tokens, tokens, (AuthoredSpan(0, 2, Version(1), digest, PeerId("p")),))
            if len(tokens) == 8
            else NOTHING
        )
        served = VersionKey(Version(2), digest)
        given = LeaseGiven(
            group, LeaseId(lease), len(self.given), PeerId("p"), (3, 1), served, base
        )
        self.given.append(given)
        self.put(given)

    @precondition(lambda self: any(stored.record.trajectories for stored in self.model.groups))
    @rule(data=st.data(), reward=st.floats(allow_nan=False))
    def score(self, data: st.DataObject, reward: float) -> None:
        record = data.draw(
            st.sampled_from([s.record for s in self.model.groups if s.record.trajectories])
        )
        index = data.draw(st.integers(0, len(record.trajectories) - 1))
        scored = list(record.trajectories)
        scored[index] = replace(scored[index], reward=reward)
        changed = replace(record, trajectories=tuple(scored))
        self.put(
            SampleRewarded(record.group, index, reward),
            groups=self.change_groups(
                lambda s: replace(s, record=changed) if s.record.group == record.group else s
            ),
        )

    @precondition(lambda self: self.model.groups)
    @rule(data=st.data(), again=st.booleans())
    def drop(self, data: st.DataObject, again: bool) -> None:
        stored = data.draw(st.sampled_from(self.model.groups))
        group, back = stored.record.group, (PromptGivenBack("", stored.cursor),) if again else ()
        self.put(
            GroupDropped(group, "chance", again),
            groups=self.change_groups(lambda s: None if s.record.group == group else s),
            given_back=_sorted({*self.model.given_back, *back}),
        )

    @precondition(lambda self: self.model.given_back)
    @rule(data=st.data(), prompt=TOKENS)
    def take_again(self, data: st.DataObject, prompt: bytes) -> None:
        back = data.draw(st.sampled_from(self.model.given_back))
        group, left = self.model.next_group, set(self.model.given_back) - {back}
        stored = StoredGroup(GroupRecord(group, prompt, ()), back.cursor)
        self.put(
            PromptTaken(group, back.cursor, prompt),
            groups=(*self.model.groups, stored),
            next_group=GroupId(group + 1),
            given_back=_sorted(left),
        )

    @rule(ahead=st.integers(1, 3), digest=DIGESTS, data=st.data())
    def freeze(self, ahead: int, digest: Digest, data: st.DataObject) -> None:
        step = self.model.checkpoint + ahead
        others = [batch for batch in self.model.frozen if batch.step != step]
        used = {group for batch in others for group in batch.groups}
        free = [
            stored.record.group for stored in self.model.groups if stored.record.group not in used
        ]
        record = BatchFrozen(step, digest, tuple(free[: data.draw(SMALL)]), ahead)
        self.put(record, frozen=tuple(sorted([*others, record], key=lambda batch: batch.step)))

    @rule(ahead=st.integers(1, 3), digest=DIGESTS)
    def commit(self, ahead: int, digest: Digest) -> None:
        record = BatchCommitted(self.model.checkpoint + ahead, self.model.epoch, digest, 0.5)
        others = [commit for commit in self.model.committed if commit.step != record.step]
        self.put(record, committed=tuple(sorted([*others, record], key=lambda commit: commit.step)))

    @rule(
        peers=st.lists(st.sampled_from("abc"), unique=True),
        rate=st.floats(1, 1e9),
        held_up=st.booleans(),
    )
    def measure(self, peers: list[str], rate: float, held_up: bool) -> None:
        measured = tuple(PeerRate(PeerId(peer), rate, held_up) for peer in peers)
        others = tuple(each for each in self.model.rates if each.peer not in peers)
        self.put(RatesMeasured(measured), rates=(*others, *measured))

    @rule(ahead=st.integers(0, 2))
    def checkpoint(self, ahead: int) -> None:
        step = self.model.checkpoint + ahead
        gone = {
            group for batch in self.model.frozen if batch.step <= step for group in batch.groups
        }
        self.put(
            CheckpointKept(step, self.model.epoch),
            checkpoint=step,
            groups=self.change_groups(lambda s: None if s.record.group in gone else s),
            frozen=tuple(batch for batch in self.model.frozen if batch.step > step),
            committed=tuple(commit for commit in self.model.committed if commit.step > step),
        )

    @rule()
    def open_again(self) -> None:
        self.flush()
        self.ledger.close()
        self.ledger = Ledger.open(self.path)

    def flush(self) -> None:
        self.ledger.append(self.waiting)
        self.waiting.clear()

    @invariant()
    def agrees(self) -> None:
        self.flush()
        found = self.ledger.recover()
        groups = {stored.record.group for stored in self.model.groups}
        given = tuple(each for each in self.given if each.group in groups)
        answered = tuple(each for group, each in self.answered if group in groups)
        model = replace(self.model, given=given, answered=answered)
        assert replace(found, groups=tuple(map(without_nan, found.groups))) == model


def _sorted(prompts: set[PromptGivenBack]) -> tuple[PromptGivenBack, ...]:
    return tuple(sorted(prompts, key=lambda each: each.cursor))


def without_nan(stored: StoredGroup) -> StoredGroup:
    plain = (
        replace(kept, reward=UNSCORED) if math.isnan(kept.reward) else kept
        for kept in stored.record.trajectories
    )
    return replace(stored, record=replace(stored.record, trajectories=tuple(plain)))


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)
