"""HTTP calls that wait for the core: each becomes a numbered event, answered by a numbered Reply.

A call that ends without its Reply is reported to the core as RequestGone.
"""

import asyncio
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from itertools import count

from echo2d.core.base.ids import RequestId
from echo2d.core.coordinator.events import CoordinatorEvent, Reply, RequestGone

# One learner has two or three calls open at a time.
PENDING_REQUESTS_MAX = 256


class PendingRequests:
    """All waiting calls of one coordinator process."""

    def __init__(self, emit: Callable[[CoordinatorEvent], Awaitable[None]]) -> None:
        self._emit = emit
        self._waiting: dict[RequestId, asyncio.Future[Reply]] = {}
        self._ids = count()
        self._closed = False

    async def ask(
        self, make: Callable[[RequestId], CoordinatorEvent], *, timeout_s: float | None
    ) -> Reply | None:
        """Emit the event and wait for its Reply; None: there was none within `timeout_s`.

        The core hears of it if the time is over or the caller hangs up. With too many open calls,
        or while the coordinator stops, the Reply is a 503 and the core is not asked.
        """
        number = RequestId(next(self._ids))
        if self._closed:
            return _stopping(number)
        if len(self._waiting) >= PENDING_REQUESTS_MAX:
            return _unavailable(number, "busy", f"{PENDING_REQUESTS_MAX} calls are waiting already")
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            async with asyncio.timeout(timeout_s):
                await self._emit(make(number))
                return await answer
        except TimeoutError:
            return None
        finally:
            del self._waiting[number]
            if not answer.done() or answer.cancelled():
                await self._emit(RequestGone(number))

    def answer(self, reply: Reply) -> None:
        """Answer a waiting call; a Reply to a call that has ended is dropped."""
        waiting = self._waiting.get(reply.request)
        if waiting is not None and not waiting.done():
            waiting.set_result(reply)

    def close(self) -> None:
        """Tell all callers, present and future, to come back later."""
        self._closed = True
        for number in self._waiting:
            self.answer(_stopping(number))


def _stopping(number: RequestId) -> Reply:
    return _unavailable(number, "stopping", "the coordinator is stopping")


def _unavailable(number: RequestId, code: str, detail: str) -> Reply:
    return Reply(number, HTTPStatus.SERVICE_UNAVAILABLE, {"error": code, "detail": detail})
