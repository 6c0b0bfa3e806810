"""The futures of all callers, and the calls that wait for their results.

    kept --> told to the calls that wait --> forgotten: the ledger need not keep it either

Not here: when an operation has ended (`learner_work`).
"""

from collections import defaultdict
from collections.abc import Iterable

from echo2d.core.base.ids import RequestId
from echo2d.core.cluster.events import Persist, Reply
from echo2d.core.tinker.events import OperationOver, ResultForgotten, TinkerRecord
from echo2d.core.tinker.futures import Failed, FutureId, Futures, Outcome
from echo2d.core.tinker.operations import ModelId

Told = Persist[TinkerRecord] | Reply


class Results:
    """See the module docstring. `now` is monotonic seconds."""

    def __init__(self) -> None:
        self._of = defaultdict[str, Futures](Futures)
        # The calls that wait for a result.
        self._waiting: dict[RequestId, FutureId] = {}
        self._waiting_for: dict[FutureId, list[RequestId]] = {}

    def of(self, caller: str) -> Futures:
        return self._of[caller]

    def ask(self, caller: str, request: RequestId, future: FutureId, *, now: float) -> list[Told]:
        """Answer this call with a result, at once or when it is there."""
        futures = self._of[caller]
        if future not in futures:
            gone = {"detail": "no such future, or its result is no longer kept"}
            return [Reply(request, 410, gone)]
        result = futures.tell(future, now=now)
        if result is not None:
            return [_told(request, result)]
        self._waiting[request] = future
        self._waiting_for.setdefault(future, []).append(request)
        return []

    def request_gone(self, request: RequestId) -> None:
        if (future := self._waiting.pop(request, None)) is not None:
            self._waiting_for[future].remove(request)

    def keep(self, caller: str, future: FutureId, result: Outcome, *, now: float) -> list[Told]:
        """Keep a result, and tell the calls that wait for it."""
        futures = self._of[caller]
        forgotten = _forgotten(futures.keep(future, result))
        waiting = self._waiting_for.pop(future, [])
        for each in waiting:
            del self._waiting[each]
            futures.tell(future, now=now)
        return [*forgotten, *(_told(each, result) for each in waiting)]

    def over(
        self, caller: str, model: ModelId, number: int, result: Outcome, *, needed: bool, now: float
    ) -> list[Told]:
        """Keep the result of an operation, in the ledger too. needed: as in `OperationOver`."""
        told = self.keep(caller, future_of(model, number), result, now=now)
        return [Persist(OperationOver(model, number, result, needed)), *told]

    def forget_told(self, *, now: float) -> list[Told]:
        """Forget the results that their callers have had for a while."""
        return [
            each
            for futures in self._of.values()
            for each in _forgotten(futures.forget_told(now=now))
        ]

    def check(self) -> None:
        for futures in self._of.values():
            futures.check()


def future_of(model: ModelId, number: int) -> FutureId:
    return FutureId(f"{model}/{number}")


def _forgotten(futures: Iterable[FutureId]) -> list[Told]:
    """Only results of operations are in the ledger, not those of samples."""
    named = (each.split("/") for each in futures if ":train:" in each)
    # A refusal of another call under a used number has a longer name.
    return [
        Persist(ResultForgotten(ModelId(each[0]), int(each[1]))) for each in named if len(each) == 2
    ]


def _told(request: RequestId, result: Outcome) -> Reply:
    if isinstance(result, Failed):
        return Reply(request, 200, {"error": result.detail, "category": result.category})
    return Reply(request, 200, result)
