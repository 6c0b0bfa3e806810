"""An event loop with real sockets whose clock jumps over the time in which nothing happens.

Data on loopback arrives as soon as it is sent. So a loop that finds no socket ready waits only for a
timer, and its clock may jump to that timer. The loop must not wait for work in another thread.
"""

import asyncio
import selectors
from types import SimpleNamespace


class SkippingLoop(asyncio.SelectorEventLoop):
    """`clock`: stands in for the module `time` where code asks for monotonic seconds."""

    def __init__(self) -> None:
        self._now = 1000.0
        super().__init__(_Skipping(self))
        self.clock = SimpleNamespace(monotonic=self.time)

    def time(self) -> float:
        return self._now

    def skip(self, seconds: float) -> None:
        self._now += seconds


class _Skipping(selectors.DefaultSelector):
    def __init__(self, loop: SkippingLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0 if timeout is not None else None)
        if not ready and timeout is not None:
            self._loop.skip(timeout)
        return ready
