"""Running leases: attempts, loads, silence."""

import pytest

from echo2d.core.base.ids import TAG_SHIFT, GroupId, LeaseId, PeerId
from echo2d.core.protocol.control_messages import SampleDelta, VersionSpan
from echo2d.core.protocol.trajectory import Partial, pack_logprobs, pack_tokens
from echo2d.core.work import leases as leases_module
from echo2d.core.work.leases import STUCK_S, Lease, LeaseTable
from tests.support.coordinator_world import version_key

WORKER = PeerId("w")


def start(leases: LeaseTable, *, now: float = 0.0, ended: Lease | None = None) -> Lease:
    lease = leases.start(
        None if ended is None else ended.key,
        GroupId(1),
        WORKER,
        version_key(0),
        {0, 1, 2},
        room=8,
        now=now,
    )
    leases.check()
    return lease


def test_lease_ids_carry_the_tag_and_attempts_are_counted() -> None:
    leases = LeaseTable(5, silence_s=15.0)
    first = start(leases)
    assert (first.key.lease, first.key.attempt) == (5 << TAG_SHIFT, 0)
    leases.end(first)
    again = start(leases, ended=first)
    assert (again.key.lease, again.key.attempt) == (first.key.lease, 1)
    assert leases.given(first.key.lease)
    assert not leases.given(LeaseId(3))
    assert not leases.given(LeaseId(first.key.lease + 1))


def test_the_load_of_a_worker_falls_with_its_answers() -> None:
    leases = LeaseTable(1, silence_s=15.0)
    lease = start(leases)
    assert leases.load(WORKER) == 3
    assert not leases.answer(lease, 0)
    assert not leases.answer(lease, 0)
    assert leases.load(WORKER) == 2
    assert not leases.answer(lease, 1)
    assert leases.answer(lease, 2)
    assert (leases.load(WORKER), len(leases), leases.get(lease.key)) == (0, 0, None)
    leases.check()


def test_silence_ends_a_lease_and_so_does_progress_without_tokens() -> None:
    leases = LeaseTable(1, silence_s=15.0)
    lease = start(leases)
    assert leases.wake_at() == 15.0
    assert leases.expired(now=14.9) == []
    for now in range(10, int(STUCK_S), 10):
        leases.renew(lease, tokens=False, now=float(now))
    assert leases.expired(now=STUCK_S - 1) == []
    assert leases.expired(now=STUCK_S) == [lease]
    leases.renew(lease, tokens=True, now=STUCK_S - 1)
    assert leases.expired(now=STUCK_S) == []


def told(sample: int, start: int, end: int, *, tokens: int | None = None) -> SampleDelta:
    """Tokens [start, end) of a sample; tokens: how many there really are."""
    count = end - start if tokens is None else tokens
    span = VersionSpan(start, end, *version_key(0))
    return SampleDelta(sample, pack_tokens([3] * count), pack_logprobs([0.0] * count), (span,))


@pytest.mark.parametrize(
    ("said", "grows"),
    [
        ([told(0, 0, 2)], [2]),
        ([told(0, 0, 2), told(0, 2, 3)], [2, 1]),
        ([told(0, 0, 2), told(0, 0, 2)], [2, 0]),
        ([told(0, 0, 2), told(0, 0, 3)], [2, 1]),
        ([told(0, 0, 2), told(1, 0, 1)], [2, 1]),
        ([told(0, 0, 9)], [0]),
        ([told(0, 0, 4, tokens=1)], [0]),
        ([told(7, 0, 1)], [0]),
    ],
    ids=["new", "more", "again", "again and more", "another", "too many", "claimed", "unknown"],
)
def test_only_tokens_that_were_never_reported_count_as_new(
    said: list[SampleDelta], grows: list[int]
) -> None:
    lease = start(LeaseTable(1, silence_s=15.0))
    assert [lease.grows([delta]) for delta in said] == grows


def test_a_worker_that_reports_without_tokens_is_idle_and_not_silent() -> None:
    leases = LeaseTable(1, silence_s=15.0)
    lease = start(leases)
    leases.renew(lease, tokens=False, now=10.0)
    assert lease.idle_s(12.0) == 12.0
    assert lease.idle_s(25.0) == 0.0


def test_an_attempt_from_before_a_restart_continues_under_its_id() -> None:
    given = start(LeaseTable(1, silence_s=15.0)).given
    leases = LeaseTable(2, silence_s=15.0)
    lease = leases.resume(given, [1, 2], room=8, now=50.0)
    leases.check()
    assert (lease.key, lease.samples, lease.silent_at, leases.load(WORKER)) == (
        given.key,
        {1, 2},
        65.0,
        2,
    )
    assert leases.given(given.lease)
    leases.end(lease)
    assert leases.given(given.lease)
    assert start(leases).key.lease != given.lease


def a_partial(tokens: int) -> Partial:
    return Partial(pack_tokens([3] * tokens), pack_logprobs([0.0] * tokens))


def test_outputs_of_a_lease_are_collected_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases_module, "GATHERED_BYTES_MAX", 8 * 10)
    leases = LeaseTable(1, silence_s=15.0)
    one, two = start(leases), start(leases)
    leases.gather(one, 0, a_partial(6))
    leases.gather(two, 0, a_partial(5))
    leases.check()
    assert (one.outputs, two.outputs) == ({0: a_partial(6)}, {0: None})
    leases.gather(one, 0, a_partial(2))
    leases.gather(two, 0, a_partial(8))
    leases.check()
    assert two.outputs == {0: a_partial(8)}
    leases.answer(one, 0)
    leases.end(two)
    leases.check()
    leases.gather(one, 1, a_partial(10))
    assert one.outputs == {1: a_partial(10)}
    leases.check()
