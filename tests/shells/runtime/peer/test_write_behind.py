"""Frames that are written a moment after they were verified."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from echo2d.core.base.ids import ChunkId, Digest, FormId, FrameId
from echo2d.core.weights.form import FrameSpan
from echo2d.runtime.peer.write_behind import UNWRITTEN_BYTES_MAX, WRITE_BYTES, Frames, WriteBehind
from tests.support.polling import HANG_S

FORM, OTHER = FormId("a" * 32), FormId("b" * 32)
FRAME_BYTES = 64 << 10


class Disk:
    """Notes what is written; a write takes until `going` is set."""

    def __init__(self) -> None:
        self.writes: list[tuple[FormId, list[FrameId]]] = []
        self.going = asyncio.Event()
        self.going.set()
        self.changed = asyncio.Event()
        self.behind = WriteBehind(self.write)

    async def write(self, form: FormId, frames: Frames) -> None:
        self.writes.append((form, list(frames)))
        self.changed.set()
        await self.going.wait()

    def put(self, *frames: int, form: FormId = FORM) -> None:
        for frame in map(FrameId, frames):
            span = FrameSpan(frame, ChunkId(0), 0, FRAME_BYTES, 0, Digest(bytes(32)))
            self.behind.put(form, span, memoryview(bytes([frame % 256]) * FRAME_BYTES))

    async def until_writes(self, count: int) -> None:
        async with asyncio.timeout(HANG_S):
            while len(self.writes) < count:
                self.changed.clear()
                await self.changed.wait()


@asynccontextmanager
async def a_disk() -> AsyncIterator[Disk]:
    disk = Disk()
    running = asyncio.create_task(disk.behind.run())
    await asyncio.sleep(0)  # it begins
    yield disk
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running


async def test_frames_that_arrive_together_are_written_together() -> None:
    async with a_disk() as disk:
        disk.put(1, 2)
        disk.put(9, form=OTHER)
        disk.put(3)
        await disk.until_writes(2)
    assert disk.writes == [(FORM, [1, 2, 3]), (OTHER, [9])]
    assert disk.behind.get(FORM, FrameId(1)) is None


async def test_a_frame_can_be_read_before_it_is_written() -> None:
    async with a_disk() as disk:
        disk.going.clear()
        disk.put(7)
        await disk.until_writes(1)
        disk.put(8)
        for frame in (7, 8):
            payload = disk.behind.get(FORM, FrameId(frame))
            assert payload is not None
            assert payload[0] == frame
        assert disk.behind.get(OTHER, FrameId(7)) is None
        disk.going.set()


async def test_many_waiting_bytes_are_written_at_once_and_too_many_are_refused() -> None:
    async with a_disk() as disk:
        disk.going.clear()
        disk.put(*range(WRITE_BYTES // FRAME_BYTES))
        await disk.until_writes(1)
        disk.put(*range(1000, 1000 + (UNWRITTEN_BYTES_MAX - WRITE_BYTES) // FRAME_BYTES))
        assert not disk.behind.has_room
        disk.going.set()
    assert len(disk.writes) == 2
    assert disk.behind.has_room


async def test_waiting_frames_are_written_at_closing_but_dropped_ones_are_not() -> None:
    async with a_disk() as disk:
        disk.put(1)
        disk.put(2, form=OTHER)
        disk.behind.drop(FORM)
        assert disk.behind.get(FORM, FrameId(1)) is None
    assert disk.writes == [(OTHER, [2])]
    assert disk.behind.has_room
