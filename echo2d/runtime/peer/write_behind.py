"""Writes verified frames to disk in batches, a moment after they were held and reported.

When frames arrive one by one, a change of threads and three disk calls for each frame would be
expensive. If the process is killed, the waiting frames are lost and must be received again: at most
WRITE_BYTES, and those that arrive during one write. Not here: verifying frames, and the reaction to a
disk that fails (`write`).
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from echo2d.core.base.ids import FormId, FrameId
from echo2d.core.weights.form import FrameSpan

# Waiting frames are written once no frame has arrived for this long, so a version is on disk this much later.
QUIET_S = 0.02
# If this much waits, the frames are written at once.
WRITE_BYTES = 1 << 20
# If this much waits, a new frame is written before it is passed on.
UNWRITTEN_BYTES_MAX = 8 << 20

Frames = dict[FrameId, tuple[FrameSpan, memoryview]]


class WriteBehind:
    """`write(form, frames)` stores frames and reports its own failure; `run` calls it."""

    def __init__(self, write: Callable[[FormId, Frames], Awaitable[None]]) -> None:
        self._write = write
        self._waiting: dict[FormId, Frames] = {}
        self._writing: dict[FormId, Frames] = {}
        self._bytes = 0  # waiting and being written
        # Set when frames wait, and when WRITE_BYTES wait.
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
        """Take a frame, to write it soon. Call it only if `has_room`."""
        assert self.has_room
        self._waiting.setdefault(form, {})[span.frame] = (span, payload)
        self._bytes += len(payload)
        self._some.set()
        if self._bytes >= WRITE_BYTES:
            self._much.set()

    def drop(self, form: FormId) -> None:
        """Forget the form's frames that are not being written yet."""
        self._bytes -= _size(self._waiting.pop(form, {}))

    async def run(self) -> None:
        """Write until cancelled; then write the frames that still wait."""
        try:
            while True:
                await self._some.wait()
                await self._until_due()
                await self._write_all()
        finally:
            await self._write_all()

    async def _until_due(self) -> None:
        """Wait until WRITE_BYTES wait, or no frame has arrived for QUIET_S."""
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
