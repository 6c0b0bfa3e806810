"""Running leases: attempts, loads, silence."""

from echo2d.core.ids import TAG_SHIFT, GroupId, LeaseId, PeerId
from echo2d.core.leases import STUCK_S, Lease, Leases
from tests.coordinator_world import version_key

WORKER = PeerId("w")


def start(leases: Leases, *, now: float = 0.0, ended: Lease | None = None) -> Lease:
    lease = leases.start(None if ended is None else ended.key, GroupId(1), WORKER, version_key(0), {0, 1, 2}, now=now)
    leases.check()
    return lease


def test_ids_carry_the_tag_and_attempts_count() -> None:
    leases = Leases(5, silence_s=15.0)
    first = start(leases)
    assert (first.key.lease, first.key.attempt) == (5 << TAG_SHIFT, 0)
    leases.end(first)
    again = start(leases, ended=first)
    assert (again.key.lease, again.key.attempt) == (first.key.lease, 1)
    assert leases.given(first.key.lease)
    assert not leases.given(LeaseId(3))
    assert not leases.given(LeaseId(first.key.lease + 1))


def test_load_follows_answers() -> None:
    leases = Leases(1, silence_s=15.0)
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
    leases = Leases(1, silence_s=15.0)
    lease = start(leases)
    assert leases.wake_at() == 15.0
    assert leases.expired(now=14.9) == []
    for now in range(10, int(STUCK_S), 10):
        leases.renew(lease, tokens=False, now=float(now))
    assert leases.expired(now=STUCK_S - 1) == []
    assert leases.expired(now=STUCK_S) == [lease]
    leases.renew(lease, tokens=True, now=STUCK_S - 1)
    assert leases.expired(now=STUCK_S) == []


def test_a_worker_that_reports_without_tokens_is_idle_and_a_silent_one_is_silent() -> None:
    leases = Leases(1, silence_s=15.0)
    lease = start(leases)
    leases.renew(lease, tokens=False, now=10.0)
    assert lease.idle_s(12.0) == 12.0
    assert lease.idle_s(25.0) == 0.0
