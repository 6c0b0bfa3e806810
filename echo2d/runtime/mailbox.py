"""Events on their way into a core: a bounded queue, emptied many at a time by the one loop that owns the core."""

import asyncio
from typing import Generic, TypeVar

EVENTS_PER_TURN_MAX = 256  # their records are one transaction; more would make the first acknowledgement wait
EVENTS_MAX = 4096  # then whoever brings more waits: a link is not read, a call not answered

Event = TypeVar("Event")


class Mailbox(Generic[Event]):
    """`put` waits while it is full; after `close` it drops."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Event] = asyncio.Queue(EVENTS_MAX)
        self._closed = False

    def __len__(self) -> int:
        return self._queue.qsize()

    async def put(self, event: Event) -> None:
        if not self._closed:
            await self._queue.put(event)

    async def take(self, *, timeout_s: float | None) -> list[Event]:
        """What waits, at most EVENTS_PER_TURN_MAX, at least one; empty after `timeout_s` (None: never)."""
        events: list[Event] = []
        if self._queue.empty():
            try:
                async with asyncio.timeout(timeout_s):
                    events.append(await self._queue.get())
            except TimeoutError:
                return []
        while len(events) < EVENTS_PER_TURN_MAX and not self._queue.empty():
            events.append(self._queue.get_nowait())
        return events

    def close(self) -> None:
        """Nobody takes any more; those who wait in `put` go on."""
        self._closed = True
        while not self._queue.empty():
            self._queue.get_nowait()
