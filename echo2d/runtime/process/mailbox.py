"""The mailbox of a core: a bounded queue of events, emptied in batches by the loop that owns it. Also the calls
that wait for an answer to their event.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from http import HTTPStatus
from typing import Generic, TypeVar

from echo2d.core.base.ids import RequestId
from echo2d.core.cluster.events import Reply
from echo2d.core.coordinator.events import CoordinatorEvent, RequestGone

# The records of one turn are one transaction, so more events in a turn would delay the first acknowledgement.
EVENTS_PER_TURN_MAX = 256
# When the mailbox is full, its producers wait: links are not read, and calls are not answered.
EVENTS_MAX = 4096

EventT = TypeVar("EventT")


class Mailbox(Generic[EventT]):
    """`put` waits while the mailbox is full; after `close` it drops the event."""

    def __init__(self) -> None:
        # A None in the queue is not an event; it only wakes `take`.
        self._queue: asyncio.Queue[EventT | None] = asyncio.Queue(EVENTS_MAX)
        self._closed = False

    def __len__(self) -> int:
        return self._queue.qsize()

    async def put(self, event: EventT) -> None:
        if self._closed:
            return
        if self._queue.full():
            await self._queue.put(event)
        else:
            self._queue.put_nowait(event)

    async def take(self, *, timeout_s: float | None) -> list[EventT]:
        """Wait for events and take up to EVENTS_PER_TURN_MAX of them.

        The list is empty after `timeout_s` seconds (None: no timeout), or after `wake`.
        """
        if not self._queue.empty():
            return self.waiting()
        try:
            async with asyncio.timeout(timeout_s):
                first = await self._queue.get()
        except TimeoutError:
            return []
        return ([] if first is None else [first]) + self.waiting(EVENTS_PER_TURN_MAX - 1)

    def waiting(self, count_max: int = EVENTS_PER_TURN_MAX) -> list[EventT]:
        """Take up to `count_max` events that are in the queue, without waiting."""
        taken = [self._queue.get_nowait() for _ in range(min(count_max, self._queue.qsize()))]
        return [event for event in taken if event is not None]

    def wake(self) -> None:
        """Make `take` return. With a full queue it returns anyway."""
        if not self._queue.full():
            self._queue.put_nowait(None)

    def close(self) -> None:
        """Drop the events in the queue and all later ones. Producers that wait in `put` continue."""
        self._closed = True
        while not self._queue.empty():
            self._queue.get_nowait()


# --- calls that wait for an answer
#
# Each HTTP call becomes a numbered event. The core answers it with a Reply of the same number. If a call
# ends without its Reply, the core gets RequestGone.

# One learner has two or three calls open at a time.
PENDING_REQUESTS_MAX = 256


class PendingRequests:
    """Waiting calls of one coordinator process. ids: the numbers of all its calls. most: this many may wait."""

    def __init__(
        self,
        emit: Callable[[CoordinatorEvent], Awaitable[None]],
        ids: Iterator[int],
        most: int = PENDING_REQUESTS_MAX,
    ) -> None:
        self._emit, self._ids, self._most = emit, ids, most
        self._waiting: dict[RequestId, asyncio.Future[Reply]] = {}
        self._closed = False

    async def ask(
        self, make: Callable[[RequestId], CoordinatorEvent], *, timeout_s: float | None
    ) -> Reply | None:
        """Emit the event and wait for its Reply; None: there was none within `timeout_s`.

        If the time is over or the caller hangs up, the core gets RequestGone. With too many open calls,
        or while the coordinator stops, the Reply is a 503 and the core is not asked.
        """
        number = RequestId(next(self._ids))
        if self._closed:
            return _stopping(number)
        if len(self._waiting) >= self._most:
            return _unavailable(number, "busy", f"{self._most} calls are waiting already")
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
        """Tell all callers, present and future, to try again later."""
        self._closed = True
        for number in self._waiting:
            self.answer(_stopping(number))


def _stopping(number: RequestId) -> Reply:
    return _unavailable(number, "stopping", "the coordinator is stopping")


def _unavailable(number: RequestId, code: str, detail: str) -> Reply:
    return Reply(number, HTTPStatus.SERVICE_UNAVAILABLE, {"error": code, "detail": detail})
