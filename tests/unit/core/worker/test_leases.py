"""Leases of one worker: granted, generated, reported, answered, kept over reconnections."""

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest

from echo2d.core.base.codec import MESSAGE_BYTES_MAX
from echo2d.core.base.ids import Digest, Epoch, LeaseId, PeerId, PublishSeq, RunId, Version
from echo2d.core.protocol.columns import Column
from echo2d.core.protocol.control_messages import (
    PROGRESS_S,
    TO_COORDINATOR,
    Finish,
    HeldLease,
    LeaseFailed,
    LeaseGranted,
    LeaseProgress,
    SampleAnswered,
    SampleFinished,
    VersionKey,
    VersionSpan,
    Welcome,
)
from echo2d.core.protocol.sampling import Sampling
from echo2d.core.protocol.trajectory import unpack_tokens
from echo2d.core.worker.events import (
    AbortGeneration,
    LabelSpan,
    LeaseAction,
    SampleProgressed,
    SendControl,
    StartGeneration,
)
from echo2d.core.worker.leases import (
    CONFIRMED_MAX,
    ENGINE_STALL_S,
    RESULTS_MAX,
    WORKER_LEASES_MAX,
    WorkerLeases,
)
from tests.support.column_engine import columns_of
from tests.support.worker import a_lease

SLOTS = 4
V1, V2 = (VersionKey(Version(n), Digest(bytes([n]) * 32)) for n in (1, 2))
LABELS = {"1-a": V1, "2-b": V2}


def key(number: int = 1) -> HeldLease:
    return HeldLease(LeaseId(number), 1)


def output(
    tokens: int,
    *,
    start: int = 0,
    lease: int = 1,
    sample: int = 0,
    label: str = "1-a",
    finish: Finish | None = None,
) -> SampleProgressed:
    spans = (LabelSpan(start, start + tokens, label),) if tokens else ()
    words = tuple(range(start, start + tokens))
    return SampleProgressed(LeaseId(lease), 1, sample, words, (-0.5,) * tokens, spans, finish)


def welcome(*kept: HeldLease) -> Welcome:
    return Welcome(PeerId("p"), RunId("run"), Epoch(1), PublishSeq(1), 2.0, kept, ())


def sent(actions: list[LeaseAction], kind: type) -> list[object]:
    return [
        each.message
        for each in actions
        if isinstance(each, SendControl) and isinstance(each.message, kind)
    ]


@pytest.fixture
def leases() -> Iterator[WorkerLeases]:
    leases = WorkerLeases(SLOTS)
    leases.confirmed(V1, now=0.0)
    yield leases
    leases.check()


def test_a_lease_starts_and_ends_with_its_results(leases: WorkerLeases) -> None:
    assert leases.granted(a_lease(), V1, now=0.0) == [StartGeneration(a_lease())]
    assert (leases.running, leases.held()) == (2, (key(),))
    assert leases.progressed(output(3), LABELS, now=1.0) == []
    [first] = sent(
        leases.progressed(output(2, start=3, finish="stop"), LABELS, now=1.0), SampleFinished
    )
    assert isinstance(first, SampleFinished)
    assert unpack_tokens(first.tokens).tolist() == [0, 1, 2, 3, 4]
    assert first.spans == (VersionSpan(0, 5, *_parts(V1)),)
    leases.progressed(output(1, sample=1, finish="length"), LABELS, now=1.0)
    assert (leases.running, leases.held()) == (0, (key(),))
    for sample in (0, 1):
        leases.answered(SampleAnswered(LeaseId(1), 1, sample, True, ""))
    assert leases.idle


def _parts(version: VersionKey) -> tuple[Version, Digest]:
    return version.version, version.digest


@pytest.mark.parametrize(
    ("serving", "lease", "reason"),
    [
        (None, a_lease(), "no version is served"),
        (V1, a_lease(oldest=2), "version 1 is served, 2 or newer is needed"),
        (V1, a_lease(samples=()), "malformed lease: samples"),
        (V1, a_lease(samples=(1, 1)), "malformed lease: samples"),
        (V1, replace(a_lease(), prompt=b"abc"), "malformed lease: prompt"),
        (V1, replace(a_lease(), prompt=b""), "malformed lease: prompt"),
        (V1, replace(a_lease(), max_new_tokens=0), "malformed lease: max_new_tokens"),
        (
            V1,
            replace(a_lease(), sampling=Sampling(math.nan)),
            "malformed lease: temperature must be 0 or at least 0.001",
        ),
    ],
)
def test_a_lease_that_cannot_be_worked_on_is_given_back(
    leases: WorkerLeases, serving: VersionKey | None, lease: LeaseGranted, reason: str
) -> None:
    assert leases.granted(lease, serving, now=0.0) == [
        SendControl(LeaseFailed(LeaseId(1), 1, reason))
    ]
    assert leases.idle


def test_leases_wait_for_slots_in_order(leases: WorkerLeases) -> None:
    leases.granted(a_lease(1), V1, now=0.0)
    leases.granted(a_lease(2, samples=(0, 1, 2)), V1, now=0.0)
    assert leases.granted(a_lease(3), V1, now=0.0) == [], "a large lease is not overtaken"
    assert leases.running == 2
    assert leases.cancelled(key(1), now=1.0) == [
        AbortGeneration(LeaseId(1), 1),
        StartGeneration(a_lease(2, samples=(0, 1, 2))),
    ]
    assert leases.cancelled(key(2), now=1.0)[1:] == [StartGeneration(a_lease(3))]


def test_a_lease_larger_than_all_slots_runs_alone(leases: WorkerLeases) -> None:
    large = a_lease(samples=tuple(range(SLOTS + 1)))
    assert leases.granted(large, V1, now=0.0) == [StartGeneration(large)]
    leases.check()


def test_new_tokens_are_reported_every_two_seconds(leases: WorkerLeases) -> None:
    leases.granted(a_lease(), V1, now=0.0)
    leases.progressed(output(3), LABELS, now=0.5)
    assert leases.report(now=1.0) == []
    assert leases.wake_at() == PROGRESS_S
    [message] = sent(leases.report(now=PROGRESS_S), LeaseProgress)
    assert isinstance(message, LeaseProgress)
    assert [(delta.sample, delta.spans) for delta in message.samples] == [
        (0, (VersionSpan(0, 3, *_parts(V1)),))
    ]
    leases.progressed(output(2, start=3), LABELS, now=2.5)
    [message] = sent(leases.report(now=2 * PROGRESS_S), LeaseProgress)
    assert isinstance(message, LeaseProgress)
    assert message.samples[0].spans == (VersionSpan(3, 5, *_parts(V1)),)
    assert sent(leases.report(now=3 * PROGRESS_S), LeaseProgress) == [
        LeaseProgress(LeaseId(1), 1, ())
    ]


def test_leases_are_reported_together(leases: WorkerLeases) -> None:
    leases.granted(a_lease(1), V1, now=0.0)
    leases.granted(a_lease(2), V1, now=1.5)
    for report_at in (PROGRESS_S, 2 * PROGRESS_S):
        assert leases.wake_at() == report_at
        told = sent(leases.report(now=report_at), LeaseProgress)
        assert told == [LeaseProgress(LeaseId(1), 1, ()), LeaseProgress(LeaseId(2), 1, ())]


def test_a_stuck_engine_does_not_keep_its_lease(leases: WorkerLeases) -> None:
    leases.granted(a_lease(), V1, now=0.0)
    leases.progressed(output(1), LABELS, now=50.0)
    actions = leases.report(now=50.0 + ENGINE_STALL_S)
    assert actions[1] == AbortGeneration(LeaseId(1), 1)
    assert sent(actions, LeaseFailed) == [LeaseFailed(LeaseId(1), 1, "no token for 120 s")]


@pytest.mark.parametrize(
    ("bad", "word"),
    [
        (output(1, label="9-z"), "never given: '9-z'"),
        (output(1, start=4), "a span [4, 5) after token 2"),
        (replace(output(2, start=2), spans=()), "spans up to 2 for 4 tokens"),
        (replace(output(1, start=2), logprobs=(math.nan,)), "between -50 and 0"),
        (replace(output(1, start=2), logprobs=(0.5,)), "between -50 and 0"),
        (replace(output(1, start=2), logprobs=()), "1 tokens, 0 logprobs"),
        (output(9, start=2), "11 in all"),
        (output(1, start=2, sample=5), "an unknown sample"),
    ],
)
def test_output_that_makes_no_sense_ends_the_lease(
    leases: WorkerLeases, bad: SampleProgressed, word: str
) -> None:
    leases.granted(a_lease(), V1, now=0.0)
    leases.progressed(output(2), LABELS, now=0.0)
    actions = leases.progressed(bad, LABELS, now=0.0)
    assert actions[1] == AbortGeneration(LeaseId(1), 1)
    [failed] = sent(actions, LeaseFailed)
    assert isinstance(failed, LeaseFailed)
    assert word in failed.reason


def test_versions_never_go_back_within_a_sample(leases: WorkerLeases) -> None:
    leases.granted(a_lease(oldest=1), V1, now=0.0)
    leases.progressed(output(2, label="2-b"), LABELS, now=0.0)
    [failed] = sent(leases.progressed(output(1, start=2), LABELS, now=0.0), LeaseFailed)
    assert isinstance(failed, LeaseFailed)
    assert "tokens of version 1 after 2" in failed.reason


def test_results_wait_until_their_version_is_confirmed(leases: WorkerLeases) -> None:
    leases.granted(a_lease(samples=(0,)), V1, now=0.0)
    leases.progressed(output(1), LABELS, now=0.0)
    assert leases.progressed(output(1, start=1, label="2-b", finish="stop"), LABELS, now=0.0) == []
    assert sent(leases.welcomed(welcome(key()), now=0.0), SampleFinished) == []
    [result] = sent(leases.confirmed(V2, now=0.0), SampleFinished)
    assert isinstance(result, SampleFinished)
    assert [span.version for span in result.spans] == [1, 2]


def test_a_lease_that_waits_for_a_long_refit_stays_alive(leases: WorkerLeases) -> None:
    """All its samples are finished, and no engine makes tokens: without a word it would end."""
    leases.granted(a_lease(samples=(0,)), V1, now=0.0)
    leases.progressed(output(2, label="2-b", finish="stop"), LABELS, now=1.0)
    times = []
    while (wake_at := leases.wake_at()) is not None and wake_at < 10.0:
        [progress] = sent(leases.report(now=wake_at), LeaseProgress)
        assert progress == LeaseProgress(key().lease, key().attempt, ())
        times.append(wake_at)
    assert times == [3.0, 5.0, 7.0, 9.0]
    assert sent(leases.confirmed(V2, now=10.0), SampleFinished)
    assert leases.report(now=11.0) == []
    assert leases.wake_at() is None


def test_a_lease_that_waits_for_a_refit_that_never_ends_falls_silent(leases: WorkerLeases) -> None:
    leases.granted(a_lease(samples=(0,)), V1, now=0.0)
    leases.progressed(output(2, label="2-b", finish="stop"), LABELS, now=1.0)
    last = 1.0
    while (wake_at := leases.wake_at()) is not None:
        last = wake_at if sent(leases.report(now=wake_at), LeaseProgress) else last
    assert ENGINE_STALL_S - PROGRESS_S <= last - 1.0 <= ENGINE_STALL_S


def test_a_lease_fails_if_its_refit_is_in_doubt(leases: WorkerLeases) -> None:
    leases.granted(a_lease(samples=(0,)), V1, now=0.0)
    leases.progressed(output(1, label="2-b", finish="stop"), LABELS, now=0.0)
    assert leases.doubted(V2, now=0.0) == [
        SendControl(LeaseFailed(LeaseId(1), 1, "a refit failed"))
    ]
    assert leases.idle


def told(actions: list[LeaseAction], sample: int = 0) -> list[int]:
    """The tokens of this sample in progress messages."""
    messages = [
        message for message in sent(actions, LeaseProgress) if isinstance(message, LeaseProgress)
    ]
    deltas = [delta for message in messages for delta in message.samples if delta.sample == sample]
    return [token for delta in deltas for token in unpack_tokens(delta.tokens).tolist()]


def test_progress_names_confirmed_versions_only(leases: WorkerLeases) -> None:
    leases.granted(a_lease(), V1, now=0.0)
    leases.progressed(output(2), LABELS, now=0.0)
    leases.progressed(output(2, start=2, label="2-b"), LABELS, now=0.0)
    assert leases.served() == (V1,)
    first = leases.report(now=PROGRESS_S)
    assert told(first) == [0, 1]
    leases.progressed(output(1, start=4, label="2-b"), LABELS, now=3.0)
    assert told(leases.report(now=2 * PROGRESS_S)) == []
    leases.confirmed(V2, now=5.0)
    assert leases.served() == (V1, V2)
    [again] = sent(leases.report(now=3 * PROGRESS_S), LeaseProgress)
    assert isinstance(again, LeaseProgress)
    assert again.samples[0].spans == (VersionSpan(2, 5, *_parts(V2)),)


def test_a_lease_may_be_written_under_a_version_that_is_served_no_more(
    leases: WorkerLeases,
) -> None:
    """A request goes on under its adapter, and its first token may come when a newer version is served."""
    leases.granted(a_lease(), V1, now=0.0)
    leases.confirmed(V2, now=1.0)
    assert leases.served() == (V1, V2)
    leases.cancelled(key(), now=2.0)
    assert leases.served() == ()


@pytest.mark.parametrize("end", ["stop", "engine fault", "stall"])
def test_results_of_a_lease_are_reported_before_it_is_given_back(
    leases: WorkerLeases, end: str
) -> None:
    leases.granted(a_lease(), V1, now=0.0)
    leases.progressed(output(2), LABELS, now=0.0)
    leases.report(now=PROGRESS_S)
    leases.progressed(output(3, start=2), LABELS, now=2.5)
    if end == "stop":
        actions = leases.give_back("SIGTERM")
    elif end == "stall":
        actions = leases.report(now=2.5 + ENGINE_STALL_S)
    else:
        actions = leases.failed(key(), "engine fault", now=3.0)
    assert told(actions) == [2, 3, 4]
    assert [type(each.message) for each in actions if isinstance(each, SendControl)] == [
        LeaseProgress,
        LeaseFailed,
    ]


def test_no_token_of_a_revoked_version_is_reported(leases: WorkerLeases) -> None:
    leases.confirmed(V2, now=0.0)
    leases.granted(a_lease(), V1, now=0.0)
    leases.progressed(output(2), LABELS, now=0.0)
    leases.progressed(output(2, start=2, label="2-b"), LABELS, now=0.0)
    assert told(leases.revoked([V2], now=1.0)) == [0, 1]


def test_every_unanswered_message_is_sent_again_over_a_new_connection(leases: WorkerLeases) -> None:
    leases.granted(a_lease(1), V1, now=0.0)
    leases.granted(a_lease(2), V1, now=0.0)
    leases.progressed(output(3), LABELS, now=0.0)
    leases.report(now=PROGRESS_S)
    leases.progressed(output(1, lease=2, finish="stop"), LABELS, now=3.0)
    leases.progressed(output(1, lease=2, sample=1, finish="stop"), LABELS, now=3.0)
    actions = leases.welcomed(welcome(key(1), key(2)), now=5.0)
    assert len(sent(actions, SampleFinished)) == 2
    [again] = sent(leases.report(now=5.0), LeaseProgress)
    assert isinstance(again, LeaseProgress)
    assert again.samples[0].spans == (VersionSpan(0, 3, *_parts(V1)),)


def test_leases_that_a_welcome_does_not_keep_end(leases: WorkerLeases) -> None:
    leases.granted(a_lease(1), V1, now=0.0)
    leases.granted(a_lease(2, samples=(0,)), V1, now=0.0)
    leases.progressed(output(1, lease=2, finish="stop"), LABELS, now=0.0)
    assert leases.welcomed(welcome(), now=1.0) == [AbortGeneration(LeaseId(1), 1)]
    assert leases.idle


def test_revoked_tokens_are_forgotten(leases: WorkerLeases) -> None:
    leases.granted(a_lease(1), V1, now=0.0)
    leases.granted(a_lease(2), V1, now=0.0)
    leases.progressed(output(1, finish="stop"), LABELS, now=0.0)
    leases.progressed(output(1, sample=1), LABELS, now=0.0)
    leases.progressed(output(1, lease=2, label="2-b"), LABELS, now=0.0)
    actions = leases.revoked([V1], now=1.0)
    assert sent(actions, LeaseFailed) == [LeaseFailed(LeaseId(1), 1, "its version was revoked")]
    assert leases.held() == (key(2),)


def test_late_events_of_ended_leases_are_ignored(leases: WorkerLeases) -> None:
    assert leases.progressed(output(1), LABELS, now=0.0) == []
    assert leases.failed(key(), "late", now=0.0) == []
    leases.answered(SampleAnswered(LeaseId(1), 1, 0, True, ""))
    leases.granted(a_lease(), V1, now=0.0)
    assert leases.granted(a_lease(), V1, now=0.0) == [], "a repeat"


def test_the_books_of_leases_are_limited(leases: WorkerLeases) -> None:
    for number in range(WORKER_LEASES_MAX):
        leases.granted(a_lease(number), V1, now=0.0)
    [failed] = sent(leases.granted(a_lease(WORKER_LEASES_MAX), V1, now=0.0), LeaseFailed)
    assert isinstance(failed, LeaseFailed)
    assert failed.reason == "too many leases"
    assert len(leases.give_back("stop")) == WORKER_LEASES_MAX + SLOTS // 2
    for number in range(RESULTS_MAX):
        leases.granted(a_lease(number, samples=(0,)), V1, now=0.0)
        leases.progressed(output(1, lease=number, finish="stop"), LABELS, now=0.0)
    [failed] = sent(leases.granted(a_lease(RESULTS_MAX), V1, now=0.0), LeaseFailed)
    assert isinstance(failed, LeaseFailed)
    assert failed.reason == "too many unanswered results"


def with_columns(event: SampleProgressed) -> SampleProgressed:
    return replace(event, columns=columns_of(event.tokens))


def test_progress_and_results_carry_the_columns_of_their_tokens(leases: WorkerLeases) -> None:
    leases.granted(a_lease(samples=(0,)), V1, now=0.0)
    leases.progressed(with_columns(output(3)), LABELS, now=0.0)
    (first,) = sent(leases.report(now=PROGRESS_S), LeaseProgress)
    leases.progressed(with_columns(output(2, start=3)), LABELS, now=0.0)
    leases.progressed(with_columns(output(1, start=5)), LABELS, now=0.0)
    (second,) = sent(leases.report(now=2 * PROGRESS_S), LeaseProgress)
    assert isinstance(first, LeaseProgress)
    assert isinstance(second, LeaseProgress)
    assert [each.samples[0].columns for each in (first, second)] == [
        columns_of([0, 1, 2]),
        columns_of([3, 4, 5]),
    ]
    leases.welcomed(welcome(key()), now=9.0)
    (again,) = sent(leases.report(now=9.0), LeaseProgress)
    assert isinstance(again, LeaseProgress)
    assert again.samples[0].columns == columns_of(range(6))
    actions = leases.progressed(with_columns(output(4, start=6, finish="length")), LABELS, now=0.0)
    (result,) = sent(actions, SampleFinished)
    assert isinstance(result, SampleFinished)
    assert result.columns == columns_of(range(10))


@pytest.mark.parametrize("without", [0, 1])
def test_a_column_that_a_part_of_an_answer_lacks_is_absent(
    leases: WorkerLeases, without: int
) -> None:
    leases.granted(a_lease(samples=(0,)), V1, now=0.0)
    parts = [output(3), output(7, start=3, finish="length")]
    parts = [part if at == without else with_columns(part) for at, part in enumerate(parts)]
    actions = [action for part in parts for action in leases.progressed(part, LABELS, now=0.0)]
    (result,) = sent(actions, SampleFinished)
    assert isinstance(result, SampleFinished)
    assert result.columns == ()


def test_columns_that_do_not_fit_their_tokens_fail_the_lease(leases: WorkerLeases) -> None:
    leases.granted(a_lease(samples=(0,)), V1, now=0.0)
    actions = leases.progressed(replace(output(3), columns=columns_of([1])), LABELS, now=0.0)
    (failed,) = sent(actions, LeaseFailed)
    assert isinstance(failed, LeaseFailed)
    assert "column experts: expected 36 bytes for 3 tokens, found 12" in failed.reason


def test_wide_columns_are_reported_in_several_messages(leases: WorkerLeases) -> None:
    """Each message stays within what a control message may have."""
    tokens = 2500
    leases.granted(a_lease(tokens=tokens + 1), V1, now=0.0)
    wide = (Column("wide", "u8", (1024,), bytes(1024 * tokens)),)
    for sample in (0, 1):
        leases.progressed(replace(output(tokens, sample=sample), columns=wide), LABELS, now=0.0)
    found = sent(leases.report(now=PROGRESS_S), LeaseProgress)
    assert len(found) == 2
    assert all(len(TO_COORDINATOR.encode(each)) < MESSAGE_BYTES_MAX for each in found)


def a_named_lease(number: int = 1) -> LeaseGranted:
    """A lease of one sample, all of whose tokens version 1 writes."""
    return replace(a_lease(number, samples=(0,), oldest=1), version=V1)


def test_a_lease_that_names_a_version_is_taken_by_a_worker_that_holds_it(
    leases: WorkerLeases,
) -> None:
    leases.confirmed(V2, (V2, V1), now=0.0)
    grant = a_named_lease()
    assert leases.granted(grant, V2, (V2, V1), now=0.0) == [StartGeneration(grant)]
    [result] = sent(leases.progressed(output(2, finish="stop"), LABELS, now=1.0), SampleFinished)
    assert isinstance(result, SampleFinished)
    assert [span.key for span in result.spans] == [V1]
    for held in ((), (V2,)):
        [refused] = sent(leases.granted(a_named_lease(2), V2, held, now=0.0), LeaseFailed)
        assert refused == LeaseFailed(LeaseId(2), 1, "it does not hold version 1")


def test_a_named_version_must_be_one_that_the_lease_allows(leases: WorkerLeases) -> None:
    grant = replace(a_named_lease(), oldest=Version(2))
    assert sent(leases.granted(grant, V2, (V2, V1), now=0.0), LeaseFailed)


def test_tokens_of_another_version_than_the_named_one_fail_the_lease(leases: WorkerLeases) -> None:
    leases.confirmed(V2, (V2, V1), now=0.0)
    leases.granted(a_named_lease(), V2, (V2, V1), now=0.0)
    leases.progressed(output(1), LABELS, now=0.0)
    [failed] = sent(
        leases.progressed(output(1, start=1, label="2-b"), LABELS, now=0.0), LeaseFailed
    )
    assert isinstance(failed, LeaseFailed)
    assert failed.reason == "the engine reported tokens of version 2; another one alone may write"


def test_a_lease_names_its_version_also_while_newer_ones_are_loaded(leases: WorkerLeases) -> None:
    """However many newer versions were served: what is held stays confirmed."""
    leases.granted(a_named_lease(), V1, (V1,), now=0.0)
    leases.granted(a_lease(2, samples=(0,)), V1, (V1,), now=0.0)
    for number in range(2, CONFIRMED_MAX + 3):
        newer = VersionKey(Version(number), Digest(bytes([number]) * 32))
        leases.confirmed(newer, (newer, V1), now=0.0)
        leases.check()
    assert V1 in leases.served()
    [result] = sent(leases.progressed(output(2, finish="stop"), LABELS, now=1.0), SampleFinished)
    assert isinstance(result, SampleFinished)


def test_a_hello_names_the_version_of_a_named_lease_and_no_newer_ones(leases: WorkerLeases) -> None:
    leases.confirmed(V2, (V2, V1), now=0.0)
    leases.granted(a_named_lease(), V2, (V2, V1), now=0.0)
    assert leases.served() == (V1,)


def test_a_lease_that_names_a_revoked_version_is_given_back(leases: WorkerLeases) -> None:
    leases.confirmed(V2, (V2, V1), now=0.0)
    leases.granted(a_named_lease(), V2, (V2, V1), now=0.0)
    leases.granted(a_lease(2, samples=(0,)), V2, (V2, V1), now=0.0)
    [failed] = sent(leases.revoked([V1], now=0.0), LeaseFailed)
    assert failed == LeaseFailed(LeaseId(1), 1, "its version was revoked")
