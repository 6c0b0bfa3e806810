"""Quarantine: peers from which two peers, or the seed, got a bad frame, and peers that accuse all others."""

from echo2d.core.base.ids import PeerId
from echo2d.core.cluster.quarantine import (
    ACCUSED_MAX,
    ACCUSERS_MAX,
    ALONE_MAX,
    MISREPORTS_MAX,
    MISREPORTS_S,
    QUARANTINE_S,
    QUARANTINE_S_MAX,
    Misreports,
    Quarantine,
)

BAD, ONE, OTHER, SEED = map(PeerId, ("bad", "one", "other", "seed"))
GOOD = [PeerId(f"good{number}") for number in range(ALONE_MAX + 1)]


def accuse(quarantine: Quarantine, accuser: PeerId, accused: PeerId, now: float = 0.0) -> PeerId:
    at_fault = quarantine.accuse(accuser, accused, is_seed=accuser == SEED, now=now)
    quarantine.check()
    return at_fault


def test_one_accuser_is_not_enough_however_often_it_accuses() -> None:
    quarantine = Quarantine()
    assert [accuse(quarantine, ONE, BAD) for _ in range(5)] == [BAD] * 5
    assert BAD not in quarantine
    assert accuse(quarantine, OTHER, BAD) == BAD
    assert BAD in quarantine


def test_several_accusers_of_one_owner_count_once() -> None:
    quarantine = Quarantine()
    for accuser in (ONE, OTHER, *GOOD):
        quarantine.accuse(accuser, BAD, owner="rented", is_seed=False, now=0.0)
        quarantine.check()
    assert BAD not in quarantine
    quarantine.accuse(PeerId("third"), BAD, owner="home", is_seed=False, now=0.0)
    assert BAD in quarantine


def test_an_accusation_by_the_seed_is_enough() -> None:
    quarantine = Quarantine()
    assert accuse(quarantine, SEED, BAD) == BAD
    assert BAD in quarantine


def test_a_peer_that_accuses_good_peers_is_at_fault() -> None:
    quarantine = Quarantine()
    assert [accuse(quarantine, BAD, good) for good in GOOD] == [*GOOD[:ALONE_MAX], BAD]
    assert accuse(quarantine, ONE, GOOD[-1]) == GOOD[-1]
    assert not any(good in quarantine for good in GOOD)


def test_a_peer_that_accuses_peers_whom_others_accuse_too_is_believed() -> None:
    quarantine = Quarantine()
    for culprit in GOOD:
        accuse(quarantine, ONE, culprit)
        assert accuse(quarantine, OTHER, culprit) == culprit
    assert all(culprit in quarantine for culprit in GOOD)


def test_a_quarantine_ends_and_takes_twice_as_long_the_next_time() -> None:
    quarantine = Quarantine()
    now = 0.0
    for times in range(10):
        accuse(quarantine, SEED, BAD, now)
        lasts = min(QUARANTINE_S_MAX, QUARANTINE_S * 2**times)
        assert quarantine.ends_at == now + lasts
        quarantine.release(now=now + lasts - 1)
        assert BAD in quarantine
        now += lasts
        quarantine.release(now=now)
        assert BAD not in quarantine
    assert quarantine.ends_at is None


def test_the_numbers_of_accused_peers_and_accusers_are_limited() -> None:
    quarantine = Quarantine()
    for number in range(ACCUSED_MAX + 5):
        accuse(quarantine, PeerId(f"by{number}"), PeerId(str(number)))
    for number in range(ACCUSED_MAX + 5):
        accuse(quarantine, SEED, PeerId(str(number)))
    liars = [PeerId(f"liar{number}") for number in range(ACCUSERS_MAX + 5)]
    for liar in liars:
        for good in GOOD:
            accuse(quarantine, liar, good)


def misreported(misreports: Misreports, times: int, *, every_s: float, results: int = 0) -> int:
    """So many in turn with so many accepted results before each; returns how many made a stream."""
    found = 0
    for number in range(times):
        found = found or misreports.misreported(BAD, results * (number + 1), now=number * every_s)
        misreports.check()
    return found


def test_a_stream_of_misreports_is_counted_in_seconds() -> None:
    assert misreported(Misreports(), MISREPORTS_MAX - 1, every_s=1.0) == 0
    assert misreported(Misreports(), MISREPORTS_MAX, every_s=1.0) == MISREPORTS_MAX
    # All that it says in the seconds in which messages cross, as when a version is revoked.
    assert misreported(Misreports(), 1000, every_s=0.01) == 0
    assert misreported(Misreports(), 1600, every_s=0.01) == 1501


def test_few_misreports_among_many_results_are_no_stream() -> None:
    assert misreported(Misreports(), 100, every_s=1.0, results=9) == 0
    assert misreported(Misreports(), 100, every_s=1.0, results=6) == MISREPORTS_MAX


def test_old_misreports_are_forgotten() -> None:
    apart_s = 1.01 * MISREPORTS_S / (MISREPORTS_MAX - 1)
    assert misreported(Misreports(), 10 * MISREPORTS_MAX, every_s=apart_s) == 0
