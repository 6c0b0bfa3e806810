"""Results that wait for their clients."""

import pytest

from echo2d.core.tinker import futures as module
from echo2d.core.tinker.futures import RESULT_KEPT_S, FutureId, Futures

ONE, TWO, THREE = FutureId("m/1"), FutureId("m/2"), FutureId("m/3")


def test_a_result_is_told_as_often_as_it_is_asked_for_and_forgotten_later() -> None:
    futures = Futures()
    futures.promise(ONE)
    assert futures.tell(ONE, now=0.0) is None
    futures.keep(ONE, {"metrics": {}})
    assert futures.tell(ONE, now=1.0) == {"metrics": {}}
    futures.forget_told(now=RESULT_KEPT_S)
    assert futures.tell(ONE, now=RESULT_KEPT_S) == {"metrics": {}}, "its answer may have been lost"
    futures.forget_told(now=1.0 + RESULT_KEPT_S)
    assert ONE not in futures
    with pytest.raises(KeyError):
        futures.tell(ONE, now=100.0)
    futures.check()


def test_a_caller_that_never_asks_keeps_its_newest_results_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "CALLER_RESULTS_BYTES_MAX", 2500)
    futures = Futures()
    for each in (ONE, TWO, THREE):
        futures.promise(each)
        futures.keep(each, bytes(700))
        futures.check()
    assert [each in futures for each in (ONE, TWO, THREE)] == [False, True, True]


def test_a_future_without_result_is_never_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CALLER_RESULTS_BYTES_MAX", 10)
    futures = Futures()
    futures.promise(ONE)
    futures.promise(TWO)
    futures.keep(TWO, bytes(100))
    assert ONE in futures
    assert futures.tell(TWO, now=0.0) == bytes(100), "the newest result stays, however large"
