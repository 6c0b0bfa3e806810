"""The mailbox of one peer process, and its end. Events from links, engines and disk on their way into its one machine.

Putting never waits, because links and engines put from callbacks and tasks that must not stall each other; what others
say over a link counts against MAILBOX_MAX, and a link that says more than is handled is ended by its receiver.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from echo2d.errors import Fault

MAILBOX_MAX = 65536  # a second's worth of everything 50 links can say; really a handful waits

PeerEvent = TypeVar("PeerEvent")

log = logging.getLogger("echo2d.runtime")


class PeerMailbox(Generic[PeerEvent]):
    """Many put, one takes."""

    def __init__(self) -> None:
        self._events: deque[PeerEvent] = deque()
        self._filled = asyncio.Event()

    @property
    def crowded(self) -> bool:
        return len(self._events) >= MAILBOX_MAX

    def put(self, event: PeerEvent) -> None:
        self._events.append(event)
        self._filled.set()

    async def take(self, wait_s: Callable[[], float | None]) -> PeerEvent | None:
        """The next event; None after `wait_s()` without one (None: never), which is asked for only if none is here."""
        if not self._events:
            self._filled.clear()
            loop, timeout_s = asyncio.get_running_loop(), wait_s()
            alarm = (
                None
                if timeout_s is None
                else loop.call_later(max(0.0, timeout_s), self._filled.set)
            )
            try:
                await self._filled.wait()
            finally:
                if alarm is not None:
                    alarm.cancel()
        return self._events.popleft() if self._events else None


def outcome(group: BaseExceptionGroup[BaseException]) -> int:
    """The one catch-all: a fault of the operator's is raised as such, anything else is our own bug."""
    faults = group.subgroup(Fault)
    while faults is not None and isinstance(faults, BaseExceptionGroup):
        first = faults.exceptions[0]
        if isinstance(first, Fault):
            raise first from None
        faults = first if isinstance(first, BaseExceptionGroup) else None
    log.critical("failed", exc_info=group)
    return 1
