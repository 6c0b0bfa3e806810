"""Writes verified frames to disk in batches, a moment after they were held and reported.

A change of threads and three calls to the disk for each frame cost much where frames come one by
one. Frames that wait when the process is killed are lost and come again: at most WRITE_BYTES, and what
arrives during one write. Not here: verifying, and what to do when the disk refuses
(`write`).
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from echo2d.core.base.ids import FormId, FrameId
from echo2d.core.weights.encoding import FrameSpan

# What waits is written when no frame has come for so long. A version is complete on disk this much later.
QUIET_S = 0.02
# When this much waits, it is written at once.
WRITE_BYTES = 1 << 20
# When this much waits, frames are written before they are passed on.
UNWRITTEN_BYTES_MAX = 8 << 20

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
        """Takes a frame to write soon. Only where `has_room`."""
        assert self.has_room
        self._waiting.setdefault(form, {})[span.frame] = (span, payload)
        self._bytes += len(payload)
        self._some.set()
        if self._bytes >= WRITE_BYTES:
            self._much.set()

    def drop(self, form: FormId) -> None:
        """Forgets frames of the form that are not being written yet."""
        self._bytes -= _size(self._waiting.pop(form, {}))

    async def run(self) -> None:
        """Writes until cancelled, and then what still waits."""
        try:
            while True:
                await self._some.wait()
                await self._until_due()
                await self._write_all()
        finally:
            await self._write_all()

    async def _until_due(self) -> None:
        """Returns when much waits, or no frame has come for QUIET_S."""
        seen = -1
        while self._bytes != seen:
            seen = self._bytes
            with suppress(TimeoutError):
                async with asyncio.timeout(QUIET_S):
                    await self._much.wait()

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
