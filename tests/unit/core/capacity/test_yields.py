"""The share of a worker's work that is worth training on."""

import pytest

from echo2d.core.base.ids import PeerId
from echo2d.core.capacity.measurements import Measurements
from echo2d.core.capacity.yields import PRIOR, YIELD_MEMORY, YIELD_WORKERS_MAX, Yields

GOOD, BAD, NEW = PeerId("good"), PeerId("bad"), PeerId("new")


def test_a_newcomer_counts_with_the_yield_of_the_pool() -> None:
    yields = Yields()
    assert yields.of(NEW) == pytest.approx(0.99)
    for _ in range(100):
        yields.judged([GOOD] * 6, trained=True)
        yields.judged([BAD] * 4, trained=False)
    assert yields.of(NEW) == pytest.approx(0.6, abs=0.01)


def test_the_yield_of_a_worker_that_makes_garbage_falls_whatever_others_do() -> None:
    yields = Yields()
    for _ in range(100):
        yields.judged([GOOD] * 8, trained=True)
        yields.judged([BAD] * 8, trained=False)
    assert yields.of(GOOD) > 0.9
    assert yields.of(BAD) < 0.07
    yields.check()


def test_a_few_trajectories_do_not_decide_a_yield() -> None:
    yields = Yields()
    yields.judged([GOOD] * 1000, trained=True)
    yields.judged([BAD], trained=False)
    assert yields.of(BAD) == pytest.approx(PRIOR / (PRIOR + 1), abs=0.02)


def test_a_repaired_worker_regains_its_yield() -> None:
    yields = Yields()
    yields.judged([BAD] * 2000, trained=False)
    yields.judged([BAD] * int(3 * YIELD_MEMORY), trained=True)
    assert yields.of(BAD) > 0.85


def test_the_number_of_remembered_workers_is_limited() -> None:
    yields = Yields()
    yields.judged([PeerId(str(number)) for number in range(2 * YIELD_WORKERS_MAX)], trained=True)
    yields.check()


def test_a_worker_that_sends_short_garbage_comes_last_within_a_minute() -> None:
    """As measured in an attack: 89 trajectories/s of one token each against 11 honest ones.

    They are judged 5 s after they were accepted; every ninth honest group has no variance.
    """
    known = Measurements(group_size=8)
    makes, slots, late_s = {BAD: 89, GOOD: 11, NEW: 9}, 16, 5
    for worker in makes:
        known.holds(worker, slots, slots, now=0.0)
    for second in range(1, 61):
        for worker, count in makes.items():
            for _ in range(count):
                known.accepted(worker, None, now=float(second))
            if second > late_s:
                worth = worker != BAD and second % 9
                known.yields.judged([worker] * count, trained=bool(worth))
        known.settle(10.0, {}, now=float(second))
        value = {
            worker: known.mu(worker, slots, None) * known.yields.of(worker) for worker in makes
        }
        if second > late_s and value[BAD] < min(value[GOOD], value[NEW]):
            break
    assert second <= 30, value
    assert known.mu(BAD, slots, None) > 3 * known.mu(GOOD, slots, None)
