"""Events on their way into a core: a bounded queue, emptied many at a time by the one loop that owns the core."""

import asyncio
from typing import Generic, TypeVar

EVENTS_PER_TURN_MAX = (
    256  # their records are one transaction; more would make the first acknowledgement wait
)
EVENTS_MAX = 4096  # then whoever brings more waits: a link is not read, a call not answered

EventT = TypeVar("EventT")


class Mailbox(Generic[EventT]):
    """`put` waits while it is full; after `close` it drops. None in the queue only wakes."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[EventT | None] = asyncio.Queue(EVENTS_MAX)
        self._closed = False

    def __len__(self) -> int:
        return self._queue.qsize()

    async def put(self, event: EventT) -> None:
        if not self._closed:
            await self._queue.put(event)

    async def take(self, *, timeout_s: float | None) -> list[EventT]:
        """What waits, at most EVENTS_PER_TURN_MAX, at least one; empty after `timeout_s` (None: never) or `wake`."""
        if not self._queue.empty():
            return self.waiting()
        try:
            async with asyncio.timeout(timeout_s):
                first = await self._queue.get()
        except TimeoutError:
            return []
        return ([] if first is None else [first]) + self.waiting(EVENTS_PER_TURN_MAX - 1)

    def waiting(self, count_max: int = EVENTS_PER_TURN_MAX) -> list[EventT]:
        """What is there already."""
        taken = [self._queue.get_nowait() for _ in range(min(count_max, self._queue.qsize()))]
        return [event for event in taken if event is not None]

    def wake(self) -> None:
        """Have `take` return; with a full queue it does so anyway."""
        if not self._queue.full():
            self._queue.put_nowait(None)

    def close(self) -> None:
        """Nobody takes any more; those who wait in `put` go on."""
        self._closed = True
        while not self._queue.empty():
            self._queue.get_nowait()
