"""Ranks watch each other through a store: a stopped rank is noticed, one that left in order raises no alarm."""

import os
import queue
import threading
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from echo2d.learner.__main__ import _FailureReport
from echo2d.learner.config import Place
from echo2d.learner.ranks.watchdog import CHECKS, FIRST_FAILURE, RankWatchdog
from tests.support.polling import HANG_S

SILENCE_S = 0.4

Lost = queue.SimpleQueue[str]


class HangingStore:
    """A connection to a store whose host is gone, as soon as `hang` is set."""

    def __init__(self, store: HashStore) -> None:
        self._store = store
        self.hang = threading.Event()
        self.answer = threading.Event()

    def __getattr__(self, name: str) -> Any:
        if self.hang.is_set():
            self.answer.wait()
        return getattr(self._store, name)


@pytest.fixture
def store() -> HashStore:
    return HashStore()


def watchdog(store: Any, rank: int, lost: Lost) -> RankWatchdog:
    return RankWatchdog(store, rank, 2, silence_s=SILENCE_S, lost=lost.put)


def heard(store: HashStore, rank: int) -> None:
    """Wait until the rank has sent heartbeats for longer than a silence."""
    goal = store.add(f"alive-{rank}", 0) + 2 * CHECKS
    waited = threading.Event()
    while store.add(f"alive-{rank}", 0) < goal:
        waited.wait(0.01)


def test_a_rank_whose_heartbeats_stop_is_lost(store: HashStore) -> None:
    lost: list[Lost] = [Lost(), Lost()]
    first = watchdog(store, 0, lost[0])
    still = HangingStore(store)
    second = watchdog(still, 1, lost[1])
    heard(store, 1)
    assert lost[0].empty()
    still.hang.set()
    assert lost[0].get(timeout=HANG_S) == f"nothing was heard of rank 1 for {SILENCE_S:g} s"
    assert lost[1].get(timeout=HANG_S) == f"nothing was heard of rank 0 for {SILENCE_S:g} s", (
        "the store is gone"
    )
    still.answer.set()
    first.leave()
    second.leave()


def test_a_rank_that_has_not_started_raises_no_alarm(store: HashStore) -> None:
    """It may still be starting, or fail before it has; then it records its failure."""
    lost = Lost()
    first = watchdog(store, 0, lost)
    heard(store, 0)
    assert lost.empty()
    store.set(FIRST_FAILURE, "1: no such device")
    assert lost.get(timeout=HANG_S)
    first.leave()


def test_a_rank_that_left_in_order_raises_no_alarm(store: HashStore) -> None:
    lost = Lost()
    first, second = (watchdog(store, rank, lost) for rank in range(2))
    heard(store, 0)
    second.leave()
    heard(store, 0)
    first.leave()
    assert lost.empty()


def test_after_a_failure_all_ranks_end(store: HashStore) -> None:
    lost: list[Lost] = [Lost(), Lost()]
    both = [watchdog(store, rank, lost[rank]) for rank in range(2)]
    heard(store, 0)
    store.set(FIRST_FAILURE, "1: no room")
    assert all(each.get(timeout=HANG_S) for each in lost)
    for each in both:
        each.leave()


def test_a_failed_rank_may_save_as_long_as_the_others_are_alive(
    store: HashStore,
) -> None:
    lost: list[Lost] = [Lost(), Lost()]
    still = HangingStore(store)
    first, second = (watchdog(each, rank, lost[rank]) for rank, each in enumerate((store, still)))
    for each in (first, second):
        each.fail()
    store.set(FIRST_FAILURE, "1: no room")
    heard(store, 0)
    heard(store, 1)
    assert all(each.empty() for each in lost)
    still.hang.set()
    assert lost[0].get(timeout=HANG_S) == f"nothing was heard of rank 1 for {SILENCE_S:g} s"
    still.answer.set()
    first.leave()
    second.leave()


@pytest.mark.parametrize(("said", "code"), [([], 1), ([1], 1), ([2], 2), ([2, 1], 2)])
def test_a_lost_rank_ends_the_others_with_the_code_of_an_earlier_failure(
    said: list[int], code: int
) -> None:
    """A fenced learner that loses other ranks while it saves is not started again."""
    child = os.fork()
    if not child:
        report = _FailureReport(Place())
        for each in said:
            report.report("it is over", each)
        report.lose("nothing was heard of rank 1 for 120 s")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code
