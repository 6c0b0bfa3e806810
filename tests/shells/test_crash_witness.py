"""The witness of a real run with kills judges groups: which may be trained, and which may leave the ledger."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from echo2d.core.base.ids import Digest, GroupId, LeaseId, PeerId, Version
from echo2d.core.coordinator.events import CoordinatorRecord
from echo2d.core.protocol.trajectory import AuthoredSpan, TrajectoryRecord
from echo2d.core.work.events import (
    BatchFrozen,
    GroupDropped,
    PromptTaken,
    SampleKept,
    SampleLeftOut,
    SampleRewarded,
)
from echo2d.store.ledger import Ledger
from tests.support.crash import (
    GROUP_SIZE,
    LATE_MAX,
    Story,
    nothing_is_lost,
    read_story,
    samples_are_whole,
    watch_ledger,
    whole_groups,
)

GROUP, BEFORE = GroupId(1), GroupId(0)  # BEFORE: another one, which is whole
ALL = range(GROUP_SIZE)
LATE = GROUP_SIZE - 1
STEP = 1


def kept(sample: int, group: GroupId = GROUP) -> CoordinatorRecord:
    spans = (AuthoredSpan(0, 1, Version(0), Digest(bytes(32)), PeerId("w" * 32)),)
    record = TrajectoryRecord(sample, b"\1\0\0\0", bytes(4), spans, "stop")
    return SampleKept(group, LeaseId(group), 0, record, b"")


def scored(samples: Sequence[int], group: GroupId = GROUP) -> list[CoordinatorRecord]:
    """These are kept, with different rewards."""
    rewards = [SampleRewarded(group, sample, float(sample)) for sample in samples]
    return [*(kept(sample, group) for sample in samples), *rewards]


def left_out(*samples: int) -> list[CoordinatorRecord]:
    return [SampleLeftOut(GROUP, sample) for sample in samples]


def frozen() -> list[CoordinatorRecord]:
    return [BatchFrozen(STEP, Digest(bytes(32)), (BEFORE, GROUP), 0)]


def ledger_of(directory: Path, *records: CoordinatorRecord) -> Path:
    """A watched ledger with two groups, of which one is whole, and these records."""
    path = directory / "coordinator" / "ledger.sqlite"
    watch_ledger(path)
    prompts = [PromptTaken(group, int(group), b"\1\0\0\0") for group in (BEFORE, GROUP)]
    with Ledger.open(path) as ledger:
        ledger.append([*prompts, *scored(ALL, BEFORE), *records])
    return path


def story_of(directory: Path, *records: CoordinatorRecord) -> Story:
    return read_story(ledger_of(directory, *records))


def test_a_group_is_trained_whole(tmp_path: Path) -> None:
    story = story_of(tmp_path, *scored(ALL), *frozen())
    assert samples_are_whole(story, GROUP_SIZE, late_max=0)[GROUP] == set(ALL)


def test_a_group_is_trained_without_the_sample_that_it_waited_for(tmp_path: Path) -> None:
    story = story_of(tmp_path, *scored(ALL[:-1]), *left_out(LATE), *frozen())
    trained = samples_are_whole(story, GROUP_SIZE, late_max=LATE_MAX)
    assert trained == {BEFORE: set(ALL), GROUP: set(ALL) - {LATE}}
    with pytest.raises(AssertionError, match="group 1 lacks too many samples"):
        samples_are_whole(story, GROUP_SIZE, late_max=0)  # without patience


@pytest.mark.parametrize(
    ("records", "fault"),
    [
        ([*scored(ALL[:-1]), *frozen()], "is not whole"),
        ([*scored(ALL[:-1]), kept(LATE), *frozen()], "is not whole"),
        ([*scored(ALL[:-1]), *frozen(), *left_out(LATE)], "is not whole"),
        ([*scored(ALL[:-2]), *left_out(LATE - 1, LATE), *frozen()], "lacks too many samples"),
        ([*scored(ALL[:-1]), kept(LATE), *left_out(LATE), *frozen()], "lacks a result"),
        ([*scored(ALL), *left_out(LATE), *frozen()], "lacks a result"),
        ([*scored(ALL[:-1]), *left_out(LATE), *frozen(), kept(LATE)], "lacks a result"),
        ([*scored(ALL), *frozen(), *left_out(LATE)], "lacks a result"),
    ],
    ids=[
        "a sample is missing, and the group declares nothing",
        "a sample has no reward",
        "the group declares it too late",
        "two samples are missing",
        "the result of the sample was acknowledged",
        "the sample had a reward",
        "the result was acknowledged later",
        "the sample was in the batch",
    ],
)
def test_a_group_without_another_sample_is_reported(
    tmp_path: Path, records: list[CoordinatorRecord], fault: str
) -> None:
    with pytest.raises(AssertionError, match=f"group 1 {fault}"):
        samples_are_whole(story_of(tmp_path, *records), GROUP_SIZE, late_max=LATE_MAX)


@pytest.mark.parametrize("missing", [[], [LATE]])
def test_a_complete_group_dropped_without_a_reason_counts_as_lost(
    tmp_path: Path, missing: list[int]
) -> None:
    complete = [*scored([each for each in ALL if each not in missing]), *left_out(*missing)]
    story = story_of(tmp_path, *complete, GroupDropped(GROUP, "stale", again=True))
    acknowledged = {result for what, _, _, result, _ in story if what == "kept"}
    with pytest.raises(AssertionError, match="group 1 was dropped for no reason"):
        nothing_is_lost(story, acknowledged)


@pytest.mark.parametrize(
    ("records", "count"),
    [
        (scored(ALL), 2),
        ([*scored(ALL[:-1]), *left_out(LATE)], 2),
        (scored(ALL[:-1]), 1),
        ([*scored(ALL), *frozen()], 0),
    ],
    ids=["whole", "as it declares", "a sample is missing", "in a batch"],
)
def test_complete_groups_of_a_ledger_are_counted(
    tmp_path: Path, records: list[CoordinatorRecord], count: int
) -> None:
    assert whole_groups(ledger_of(tmp_path, *records)) == count
