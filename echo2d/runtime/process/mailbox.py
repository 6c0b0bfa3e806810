"""The mailbox of a core: a bounded queue of events, emptied in batches by the loop that owns it."""

import asyncio
from typing import Generic, TypeVar

# The records of one turn are one transaction. More of them would delay the first acknowledgement.
EVENTS_PER_TURN_MAX = 256
# When the mailbox is full, its producers wait: links are not read, and calls are not answered.
EVENTS_MAX = 4096

EventT = TypeVar("EventT")


class Mailbox(Generic[EventT]):
    """`put` waits while the mailbox is full; after `close` it drops the event."""

    def __init__(self) -> None:
        # A None in the queue is no event; it only wakes `take`.
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
        """Take up to `count_max` events that are there already, without waiting."""
        taken = [self._queue.get_nowait() for _ in range(min(count_max, self._queue.qsize()))]
        return [event for event in taken if event is not None]

    def wake(self) -> None:
        """Make `take` return. With a full queue it returns anyway."""
        if not self._queue.full():
            self._queue.put_nowait(None)

    def close(self) -> None:
        """Drop all events, now and from now on. Producers that wait in `put` continue."""
        self._closed = True
        while not self._queue.empty():
            self._queue.get_nowait()
