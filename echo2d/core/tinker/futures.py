r"""The results of operations, until the client has them.

    promised --keep--> kept --told--> forgotten after RESULT_KEPT_S, because the answer may be lost on its way
                         \--never asked for--> forgotten when its caller keeps more than CALLER_RESULTS_BYTES_MAX

Of one caller the oldest results go first, so a client that never asks holds no memory.
Not here: what an operation is (`operations`), HTTP.
"""

from dataclasses import dataclass
from typing import Any, Literal, NewType

FutureId = NewType("FutureId", str)

# Bytes of all kept results of one caller.
CALLER_RESULTS_BYTES_MAX = 256 << 20
# What a result, or an operation that is kept, counts beside its bytes.
ENTRY_BYTES = 512
RESULT_KEPT_S = 60.0

# Whose mistake it was.
Category = Literal["user", "server"]


@dataclass(frozen=True, slots=True)
class Failed:
    """An operation has failed, in words for the client."""

    detail: str
    category: Category = "user"


# A JSON object, or an encoded protobuf message.
Outcome = dict[str, Any] | bytes | Failed


@dataclass(slots=True)
class _Future:
    result: Outcome | None = None

    @property
    def bytes(self) -> int:
        if self.result is None:
            return 0
        return ENTRY_BYTES + (len(self.result) if isinstance(self.result, bytes) else 0)


class Futures:
    """The futures of one caller. `now` is monotonic seconds."""

    def __init__(self) -> None:
        # In the order in which they were promised.
        self._futures: dict[FutureId, _Future] = {}
        self._bytes = 0
        # The told ones, in the order in which they were told.
        self._told: dict[FutureId, float] = {}

    def __contains__(self, future: FutureId) -> bool:
        return future in self._futures

    def promise(self, future: FutureId) -> None:
        self._futures.setdefault(future, _Future())

    def keep(self, future: FutureId, result: Outcome) -> list[FutureId]:
        """The operation has ended. The first result counts.

        Forgets the oldest results of a caller that keeps too many bytes, and returns them.
        """
        kept = self._futures.setdefault(future, _Future())
        if kept.result is not None:
            return []
        kept.result = result
        self._bytes += kept.bytes
        return self._make_room(kept) if self._bytes > CALLER_RESULTS_BYTES_MAX else []

    def tell(self, future: FutureId, *, now: float) -> Outcome | None:
        """The result; None: the operation has not ended. KeyError: there is no such future (any more)."""
        kept = self._futures[future]
        if kept.result is not None:
            self._told.setdefault(future, now)
        return kept.result

    def forget_told(self, *, now: float) -> list[FutureId]:
        """Forget the results that were told RESULT_KEPT_S ago, and return them."""
        forgotten = []
        for name, told_at in self._told.items():
            if told_at + RESULT_KEPT_S > now:
                break
            forgotten.append(name)
        for name in forgotten:
            self._forget(name)
        return forgotten

    def _make_room(self, newest: _Future) -> list[FutureId]:
        over, oldest = self._bytes - CALLER_RESULTS_BYTES_MAX, []
        for name, each in self._futures.items():
            if over <= 0:
                break
            if each.bytes and each is not newest:
                oldest.append(name)
                over -= each.bytes
        for name in oldest:
            self._forget(name)
        return oldest

    def _forget(self, future: FutureId) -> None:
        self._bytes -= self._futures.pop(future).bytes
        self._told.pop(future, None)

    def check(self) -> None:
        assert self._bytes == sum(each.bytes for each in self._futures.values())
        assert all(self._futures[name].result is not None for name in self._told)
