"""The gates compared with a plain model: in any order of events, frozen batches are fresh, whole, and unchanged."""

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from echo2d.core.base.ids import Digest, GroupId, PeerId, Version
from echo2d.core.coordinator.events import Recovered
from echo2d.core.protocol.trajectory import (
    AuthoredSpan,
    GroupRecord,
    StoredGroup,
    TrajectoryRecord,
    pack_logprobs,
    pack_tokens,
)
from echo2d.core.work.training.staleness import REFUSALS_MAX, Staleness
from tests.support.coordinator_world import rules, version_digest, version_key


def group(number: int, versions: list[int]) -> StoredGroup:
    """One trajectory in which these versions wrote a token each, and one with another reward."""
    spans = tuple(
        AuthoredSpan(i, i + 1, Version(v), version_digest(v), PeerId("w"))
        for i, v in enumerate(sorted(versions))
    )
    tokens, logprobs = pack_tokens(range(len(versions))), pack_logprobs([0.0] * len(versions))
    record = TrajectoryRecord(0, tokens, logprobs, spans, "stop", 1.0)
    both = (record, replace(record, sample=1, reward=float(number % 3)))
    return StoredGroup(GroupRecord(GroupId(number), pack_tokens([1]), both), cursor=number)


class Machine(RuleBasedStateMachine):
    """Groups of arbitrary token versions, and a learner that asks, commits, refuses, resumes."""

    @initialize(
        bound=st.integers(0, 3),
        per_step=st.integers(1, 3),
        mode=st.sampled_from(["drop", "mask"]),
        order=st.sampled_from(["oldest", "priority"]),
    )
    def begin(self, bound: int, per_step: int, mode: str, order: str) -> None:
        self.bound, self.per_step, self.mask = bound, per_step, mode == "mask"
        the_rules = rules(
            staleness_max=bound,
            trajectories_per_step=per_step,
            group_size=1,
            over_stale=mode,
            order=order,
        )
        self.staleness = Staleness(the_rules, Recovered.nothing())
        self.step_of: dict[GroupId, int] = {}
        self.bytes: dict[int, Digest | None] = {}
        self.number = 0

    def admissible(self, stored: StoredGroup, step: int) -> bool:
        oldest, newest = stored.record.version_min, stored.record.version_max
        return step - 1 - (newest if self.mask else oldest) <= self.bound and newest <= step - 1

    @rule(offsets=st.lists(st.integers(-4, 0), min_size=1, max_size=3), count=st.integers(1, 4))
    def groups_complete(self, offsets: list[int], count: int) -> None:
        for _ in range(count):
            self.number += 1
            stored = group(
                self.number, [max(0, self.staleness.committed + offset) for offset in offsets]
            )
            taken = self.staleness.admit(stored)
            last = self.staleness.open_step + 10
            assert taken == any(
                self.admissible(stored, step) for step in range(self.staleness.open_step, last)
            )

    @rule(ahead=st.integers(1, 2), in_flight=st.integers(0, 6))
    def freezes(self, ahead: int, in_flight: int) -> None:
        step, before = self.staleness.open_step, self.staleness.buffered
        batch = self.staleness.freeze(self.staleness.committed + ahead, {"": in_flight})
        self.staleness.age()
        if batch is None:
            assert before == self.staleness.buffered
            return
        assert batch.step == step <= self.staleness.committed + ahead
        assert len(batch.groups) == self.per_step
        for stored in batch.groups:
            assert self.admissible(stored, step)
            assert self.step_of.setdefault(stored.record.group, step) == step
        self.bytes[step] = batch.digest

    @rule()
    def commits(self) -> None:
        if self.staleness.batch(self.staleness.committed + 1) is not None:
            self.staleness.commit(self.staleness.committed + 1)

    @rule(which=st.integers(0, 10))
    def refuses(self, which: int) -> None:
        batch = self.staleness.batch(self.staleness.committed + 1 + which % 2)
        if batch is not None and batch.refusals < REFUSALS_MAX:
            named = batch.groups[which % len(batch.groups)].record.group
            out = self.staleness.refuse(batch.step, {named: "bad"}, lambda record: False)
            assert [stored.record.group for stored in out] == [named]
            assert self.staleness.open_step <= batch.step
            del self.bytes[batch.step]

    @rule(back=st.integers(0, 3))
    def resumes(self, back: int) -> None:
        step = max(self.staleness.checkpoint, self.staleness.committed - back)
        self.staleness.resume(step)
        revoked = [version_key(version) for version in range(step + 1, step + 10)]
        self.staleness.withdraw(lambda group: group.uses(revoked))
        self.staleness.age()
        assert self.staleness.committed == step

    @rule(back=st.integers(0, 2))
    def checkpoints(self, back: int) -> None:
        step = max(self.staleness.checkpoint, self.staleness.committed - back)
        self.staleness.keep_checkpoint(step)
        self.bytes = {each: digest for each, digest in self.bytes.items() if each > step}

    @rule(in_flight=st.integers(0, 8))
    def admission(self, in_flight: int) -> None:
        """Monotone; the formula where nothing lies beyond n; and the newest weights can always fill batch n."""
        [(_, step, oldest)] = self.staleness.next_groups({"": in_flight})
        [(_, later, _)] = self.staleness.next_groups({"": in_flight + 1})
        assert self.staleness.open_step <= step <= later
        if (
            max(self.staleness._batches, default=0) <= self.staleness.open_step
        ):  # full or refused into
            held = self.staleness.queued(in_flight)
            assert step == self.staleness.open_step + held // self.per_step
        assert oldest == max(0, step - 1 - self.bound)

    def teardown(self) -> None:
        if not hasattr(self, "staleness"):
            return
        for step, digest in self.bytes.items():
            batch = self.staleness.batch(step)
            assert batch is not None
            assert batch.digest == digest

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "staleness"):
            self.staleness.check()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=80, stateful_step_count=40)
