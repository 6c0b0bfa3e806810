"""Limits on the requests of the gateway. Beyond them a request is refused (429, Retry-After).

    request --OpenRequests--> rendered and tokenized at the Desk --> a call, limited by the core

Not here: what a request says.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import TypeVar

from echo2d.net.gateway.errors import CallRefusal

# 1.5 times the choices that may be open. Each request holds a body of up to 1 MiB and its answer.
GATEWAY_REQUESTS_MAX = 768
# Half of all, so that one caller cannot shut the others out.
REQUESTS_OF_CALLER_MAX = 384
# Templates and tokenizers run in threads that compete with the coordinator's loop.
RENDERING_MAX = 2
# Prompts that wait for a thread; a long prompt takes some 100 ms.
RENDER_QUEUE_MAX = 64

T = TypeVar("T")


def busy(detail: str) -> CallRefusal:
    return CallRefusal(HTTPStatus.TOO_MANY_REQUESTS, "busy", f"{detail}; try again")


class OpenRequests:
    """Counts the open requests, from their first byte to the last byte of their answer."""

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()

    @contextmanager
    def one_of(self, caller: str) -> Iterator[None]:
        """Count one more request. CallRefusal: there are too many."""
        if self._open[caller] >= REQUESTS_OF_CALLER_MAX:
            raise busy(f"{REQUESTS_OF_CALLER_MAX} requests of yours are open")
        if self._open.total() >= GATEWAY_REQUESTS_MAX:
            raise busy(f"{GATEWAY_REQUESTS_MAX} requests are open")
        self._open[caller] += 1
        try:
            yield
        finally:
            self._open[caller] -= 1
            if not self._open[caller]:
                del self._open[caller]


class Desk:
    """Blocking work on prompts, RENDERING_MAX at a time.

    A thread cannot be stopped, so a caller that hangs up does not free its place.
    """

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(RENDERING_MAX)
        self._waiting = 0

    async def do(self, work: Callable[[], T]) -> T:
        """Do this work in a thread. CallRefusal: too much work waits already."""
        if self._waiting >= RENDER_QUEUE_MAX:
            raise busy(f"{RENDER_QUEUE_MAX} prompts wait to be rendered")
        self._waiting += 1
        try:
            await self._places.acquire()
        finally:
            self._waiting -= 1
        working = asyncio.get_running_loop().run_in_executor(None, work)
        working.add_done_callback(lambda _: self._places.release())
        return await asyncio.shield(working)
