"""The gates, in exact counts."""

from dataclasses import replace

import pytest

from echo2d.core.base.ids import GroupId, PeerId, Version
from echo2d.core.coordinator.events import Recovered
from echo2d.core.protocol.trajectory import (
    AuthoredSpan,
    GroupRecord,
    StoredGroup,
    TrajectoryRecord,
    pack_logprobs,
    pack_tokens,
    unpack_batch,
)
from echo2d.core.rules.run import RunRules
from echo2d.core.work.training.staleness import FROZEN_MAX, Staleness
from echo2d.errors import IntegrityFault
from tests.support.coordinator_world import rules, version_digest, version_key


def group(number: int, *versions: int) -> StoredGroup:
    """One trajectory, a token of each version."""
    spans = tuple(
        AuthoredSpan(i, i + 1, Version(v), version_digest(v), PeerId("w"))
        for i, v in enumerate(versions)
    )
    tokens, logprobs = pack_tokens(range(len(versions))), pack_logprobs([0.0] * len(versions))
    record = TrajectoryRecord(0, tokens, logprobs, spans, "stop", 1.0)
    return StoredGroup(GroupRecord(GroupId(number), pack_tokens([1]), (record,)), cursor=number)


def gates(recovered: Recovered | None = None, **changes: object) -> Staleness:
    """G = 2 groups of one trajectory per step."""
    the_rules: RunRules = rules(
        **{"trajectories_per_step": 2, "group_size": 1, "staleness_max": 1, **changes}
    )  # fmt: skip
    return Staleness(the_rules, recovered or Recovered.nothing())


def fill(staleness: Staleness, *groups: StoredGroup) -> None:
    for each in groups:
        assert staleness.admit(each)
    staleness.check()


@pytest.mark.parametrize(
    ("in_flight", "step", "oldest"),
    [(0, 1, 0), (1, 1, 0), (2, 2, 0), (3, 2, 0), (4, 3, 1), (5, 3, 1), (6, 4, 2)],
)
def test_admission_counts_groups(in_flight: int, step: int, oldest: int) -> None:
    assert gates().next_groups({"": in_flight}) == [(rules().tasks[0], step, oldest)]


def test_a_batch_freezes_when_asked_for_full_and_in_order() -> None:
    staleness = gates()
    fill(staleness, group(0, 0))
    assert staleness.freeze(1) is None  # one is missing
    fill(staleness, group(1, 0), group(2, 0), group(3, 0))
    assert staleness.freeze(0) is None  # not asked for
    first = staleness.freeze(2)
    assert first is not None
    assert [g.record.group for g in first.groups] == [0, 1]
    assert staleness.open_step == 2
    second = staleness.freeze(2)
    assert second is not None
    assert staleness.freeze(2) is None
    assert unpack_batch(second.body()).step == 2
    staleness.check()


def test_groups_that_age_first_are_taken_first() -> None:
    staleness = gates(staleness_max=3)
    fill(staleness, group(0, 1), group(1, 0), group(2, 1), group(3, 0))
    assert staleness.freeze(1) is not None  # versions 0: 1 and 3
    assert staleness.open_step == 2
    batch = staleness.freeze(2)
    assert batch is not None
    assert [g.record.group for g in batch.groups] == [0, 2]


def spread_group(number: int, version: int, spread: float) -> StoredGroup:
    """Two trajectories whose rewards have this standard deviation."""
    stored = group(number, version)
    (one,) = stored.record.trajectories
    both = (one.scored(0.0), replace(one.scored(2 * spread), sample=1))
    return replace(stored, record=replace(stored.record, trajectories=both))


def test_groups_whose_rewards_differ_most_are_taken_first_by_priority() -> None:
    spreads = [(0, 0.1), (1, 0.2), (2, 0.3), (3, 0.4)]
    for order, taken in (("oldest", [0, 1]), ("priority", [2, 3])):
        staleness = gates(order=order, trajectories_per_step=4, group_size=2, staleness_max=2)
        fill(staleness, *(spread_group(number, 0, spread) for number, spread in spreads))
        batch = staleness.freeze(1)
        assert batch is not None
        assert [g.record.group for g in batch.groups] == taken
        staleness.check()
        # The others are not lost.
        assert staleness.freeze(2) is not None
        assert staleness.age() == []


def test_priority_leaves_the_places_of_groups_in_flight_free() -> None:
    """Two groups of version 0 and two of version 1 wait in step 2; step 3 is the last one of version 0."""
    for in_flight, taken in ((0, [2, 3]), (1, [1, 3]), (2, [0, 1])):
        staleness = gates(order="priority", trajectories_per_step=4, group_size=2, staleness_max=2)
        fill(staleness, spread_group(8, 0, 0.5), spread_group(9, 0, 0.5))
        assert staleness.freeze(1) is not None
        fill(staleness, spread_group(0, 0, 0.1), spread_group(1, 0, 0.2))
        fill(staleness, spread_group(2, 1, 0.3), spread_group(3, 1, 0.4))
        batch = staleness.freeze(2, {"": in_flight})
        assert batch is not None
        assert [g.record.group for g in batch.groups] == taken, in_flight


def test_a_prefetched_batch_takes_nothing_too_old_either() -> None:
    staleness = gates(staleness_max=0)
    fill(staleness, *(group(number, 0) for number in range(4)))
    assert staleness.freeze(2) is not None
    assert staleness.freeze(2) is None
    assert len(staleness.age()) == 2


def test_a_batch_has_nothing_newer_than_the_weights_that_are_trained() -> None:
    staleness = gates()
    fill(staleness, group(0, 1), group(1, 1))
    assert staleness.freeze(1) is None


def test_groups_that_are_too_old_are_dropped_or_masked() -> None:
    for mode, kept in (("drop", [22]), ("mask", [21, 22])):
        staleness = gates(over_stale=mode)
        fill(staleness, *(group(number, 0, 0) for number in (10, 11, 12, 13)), group(20, 0, 0))
        fill(staleness, group(21, 0, 1), group(22, 1, 1))
        assert staleness.freeze(1) is not None
        assert staleness.age() == []
        assert staleness.freeze(2) is not None  # now n = 3: tokens of version 0 are too old
        out = staleness.age()
        assert sorted({20, 21, 22} - {g.record.group for g in out}) == kept
        staleness.check()
        assert not staleness.admit(group(99, 0, 0))


def test_a_group_in_flight_can_be_outdated() -> None:
    staleness = gates()
    fill(staleness, *(group(number, 0) for number in range(4)))
    staleness.freeze(2)
    staleness.freeze(2)
    assert staleness.oldest == 1
    assert staleness.outdated(Version(0), None)
    masked = gates(over_stale="mask", staleness_max=0)
    assert not masked.outdated(Version(0), None)


def test_a_refusal_opens_the_batch_and_its_free_places_count_first() -> None:
    staleness = gates()
    fill(staleness, *(group(number, 0) for number in range(4)))
    first = staleness.freeze(2)
    assert first is not None
    assert staleness.freeze(2) is not None
    digest = first.digest
    out = staleness.refuse(1, {GroupId(1): "bad"}, lambda record: False)
    assert [g.record.group for g in out] == [1]
    staleness.check()
    assert (staleness.open_step, staleness.queued(0)) == (1, 3)
    assert [staleness.next_groups({"": count})[0].step for count in range(4)] == [1, 3, 3, 4]
    fill(staleness, group(7, 0))
    again = staleness.freeze(2)
    assert again is not None
    assert ([g.record.group for g in again.groups], again.refusals) == ([0, 7], 1)
    assert again.digest != digest
    assert staleness.open_step == 3


def test_a_refusal_also_removes_revoked_groups() -> None:
    staleness = gates()
    fill(staleness, group(0, 0), group(1, 0))
    staleness.freeze(1)
    assert len(staleness.refuse(1, {GroupId(0): "bad"}, lambda record: True)) == 2


def test_a_revocation_spares_only_full_batches() -> None:
    staleness = gates()
    fill(staleness, *(group(number, 0) for number in range(4)))
    staleness.freeze(2)
    staleness.freeze(2)
    staleness.refuse(2, {GroupId(2): "bad"}, lambda record: False)
    fill(staleness, group(5, 0), group(6, 1))
    out = staleness.withdraw(lambda group: group.uses([version_key(0)]))
    assert sorted(g.record.group for g in out) == [3, 5]
    staleness.check()
    assert staleness.batch(1) is not None


def test_the_gates_follow_commits_checkpoints_and_resumes() -> None:
    staleness = gates()
    for step in (1, 2, 3):
        fill(staleness, group(2 * step, step - 1), group(2 * step + 1, step - 1))
        assert staleness.freeze(step) is not None
        assert staleness.commit(step)
    staleness.keep_checkpoint(1)
    assert staleness.batch(1) is None
    passed, unfinished = staleness.resume(2)
    assert ([batch.step for batch in passed], unfinished) == ([2], [])
    assert (staleness.committed, staleness.open_step) == (2, 4)
    assert not staleness.commit(3)  # trained on before, in another epoch
    staleness.check()
    staleness.resume(3)
    assert staleness.open_step == 4


def test_the_newest_step_is_the_last_one_given_out_or_committed() -> None:
    staleness = gates()
    fill(staleness, *(group(number, 0) for number in range(4)))
    assert staleness.newest_step == 0
    staleness.freeze(2)
    staleness.freeze(2)
    assert staleness.newest_step == 2
    staleness.refuse(1, {GroupId(0): "bad"}, lambda record: False)
    assert staleness.newest_step == 0
    fill(staleness, group(4, 0))
    staleness.freeze(1)
    staleness.commit(1)
    staleness.refuse(2, {GroupId(2): "bad"}, lambda record: False)
    assert staleness.newest_step == 1
    staleness.resume(0)
    assert staleness.newest_step == 1
    staleness.check()


def test_a_recovery_checks_the_bytes_and_reopens_batches_that_lack_a_group() -> None:
    staleness = gates()
    stored = (group(0, 0), group(1, 0))
    fill(staleness, *stored)
    batch = staleness.freeze(1)
    assert batch is not None
    found = replace(Recovered.nothing(), groups=stored, frozen=(batch.frozen(),))
    again = gates(found).batch(1)
    assert again is not None
    assert again.body() == batch.body()
    reopened = gates(replace(found, groups=stored[:1]))
    assert (reopened.batch(1), reopened.open_step, reopened.queued(0)) == (None, 1, 1)
    reopened.check()
    with pytest.raises(IntegrityFault):
        gates(replace(found, groups=(group(0, 0), group(1, 1))))


def test_batches_stop_at_a_limit_without_checkpoints() -> None:
    staleness = gates()
    for step in range(1, FROZEN_MAX + 2):
        staleness.admit(group(2 * step, step - 1))
        staleness.admit(group(2 * step + 1, step - 1))
        assert (staleness.freeze(step) is None) == (step == FROZEN_MAX + 1)
    assert staleness.crowded
