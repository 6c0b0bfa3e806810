"""Verified frames on their way to disk: passed on at once, written a moment later, many together.

A change of threads and three calls to the disk for each frame are dear where frames come one by one. What waits is
lost with the process and comes again: at most what arrives in WRITE_S and during one write. Not here: verifying, and
what to do when the disk refuses (`write`).
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from echo2d.core.base.ids import FormId, FrameId
from echo2d.core.weights.encoding import FrameSpan

WRITE_S = 0.02  # a frame waits no longer for company; a version is done so much later
WRITE_BYTES = 1 << 20  # with so much waiting nothing waits any longer
UNWRITTEN_BYTES_MAX = 8 << 20  # then frames are written before they are passed on

Frames = dict[FrameId, tuple[FrameSpan, memoryview]]


class WriteBehind:
    """`write(form, frames)` stores frames and reports its own failure; `run` calls it."""

    def __init__(self, write: Callable[[FormId, Frames], Awaitable[None]]) -> None:
        self._write = write
        self._waiting: dict[FormId, Frames] = {}
        self._writing: dict[FormId, Frames] = {}
        self._bytes = 0  # of both
        self._some, self._much = asyncio.Event(), asyncio.Event()

    @property
    def has_room(self) -> bool:
        return self._bytes < UNWRITTEN_BYTES_MAX

    def get(self, form: FormId, frame: FrameId) -> memoryview | None:
        """The payload of a frame that is not on disk yet."""
        for frames in (self._waiting.get(form), self._writing.get(form)):
            if frames and frame in frames:
                return frames[frame][1]
        return None

    def put(self, form: FormId, span: FrameSpan, payload: memoryview) -> None:
        """To be written soon. There is room."""
        assert self.has_room
        self._waiting.setdefault(form, {})[span.frame] = (span, payload)
        self._bytes += len(payload)
        self._some.set()
        if self._bytes >= WRITE_BYTES:
            self._much.set()

    def drop(self, form: FormId) -> None:
        """What is not being written yet need not be."""
        self._bytes -= _size(self._waiting.pop(form, {}))

    async def run(self) -> None:
        """Until cancelled; what waits then is still written."""
        try:
            while True:
                await self._some.wait()
                with suppress(TimeoutError):
                    async with asyncio.timeout(WRITE_S):
                        await self._much.wait()
                await self._write_all()
        finally:
            await self._write_all()

    async def _write_all(self) -> None:
        self._some.clear()
        self._much.clear()
        self._writing, self._waiting = self._waiting, {}
        while self._writing:
            form, frames = next(iter(self._writing.items()))
            try:
                await self._write(form, frames)
            finally:
                self._bytes -= _size(self._writing.pop(form))


def _size(frames: Frames) -> int:
    return sum(len(payload) for _, payload in frames.values())
