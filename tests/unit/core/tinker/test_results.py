"""Results of all callers, and the calls that wait for them."""

from echo2d.core.base.ids import RequestId
from echo2d.core.cluster.events import Persist, Reply
from echo2d.core.tinker.events import OperationOver, ResultForgotten
from echo2d.core.tinker.futures import RESULT_KEPT_S, Failed, FutureId
from echo2d.core.tinker.operations import ModelId
from echo2d.core.tinker.results import Results, future_of

MODEL = ModelId("s:train:0")


def waited(request: int, results: Results) -> list[object]:
    return [*results.ask("ann", RequestId(request), future_of(MODEL, 1), now=0.0)]


def test_a_result_is_told_to_all_calls_that_wait_and_leaves_the_ledger_a_while_later() -> None:
    results = Results()
    results.of("ann").promise(future_of(MODEL, 1))
    assert waited(1, results) == waited(2, results) == waited(3, results) == []
    results.request_gone(RequestId(2))
    told = results.over("ann", MODEL, 1, Failed("bad"), needed=True, now=0.0)
    assert told[0] == Persist(OperationOver(MODEL, 1, Failed("bad"), needed=True))
    assert [each.request for each in told if isinstance(each, Reply)] == [1, 3]
    results.check()
    assert results.forget_told(now=RESULT_KEPT_S - 1) == []
    assert results.forget_told(now=RESULT_KEPT_S) == [Persist(ResultForgotten(MODEL, 1))]
    (gone,) = results.ask("ann", RequestId(4), future_of(MODEL, 1), now=0.0)
    assert isinstance(gone, Reply)
    assert gone.status == 410


def test_a_sample_is_not_in_the_ledger() -> None:
    results, future = Results(), FutureId("s:sample:0/1")
    results.of("ann").promise(future)
    assert results.ask("ann", RequestId(1), future, now=0.0) == []
    assert len(results.keep("ann", future, b"tokens", now=0.0)) == 1
    assert results.forget_told(now=RESULT_KEPT_S) == []
