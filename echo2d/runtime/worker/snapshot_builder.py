"""Builds a snapshot from a form: decodes chunks into the spare slot, verifies it, and switches the slots.

A chunk is decoded as soon as all its frames have arrived, while the rest of the form still arrives and
the engines serve the current slot. The current slot is only read: chunks that did not change are
copied from it, and it is the base of delta forms. Reading, decoding and writing happen in threads.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice

from echo2d.core.base.ids import ChunkId, Digest, FormId, FrameId, SegmentId
from echo2d.core.weights.form import ChunkRecord, LacksBase, decode_record, require_base
from echo2d.core.weights.manifest import CHUNK_BYTES, Chunk, chunk_layout
from echo2d.core.weights.verifier import FormIndex
from echo2d.core.worker.events import ApplyCancelled, ApplyRejected, SnapshotReady
from echo2d.errors import IntegrityFault, StoreFault
from echo2d.runtime.peer.frame_holdings import FrameHoldings
from echo2d.store.frames import FramesDamaged, FrameStore
from echo2d.store.slots.current_slot import CurrentSlot
from echo2d.store.slots.slot_store import SlotStore
from echo2d.store.slots.slot_writer import SlotWriter
from echo2d.store.snapshots import read_chunk_into
from echo2d.threads import CHUNK_THREADS_MAX, Buffers, chunk_threads

log = logging.getLogger("echo2d.worker")


class _CopyDamaged(IntegrityFault):
    """A chunk of the current slot is not what its manifest says."""


class SnapshotBuilder:
    """Builds one form at a time: `apply` must return before it is called again."""

    def __init__(self, slots: SlotStore, store: FrameStore, holdings: FrameHoldings) -> None:
        self._slots, self._store, self._holdings = slots, store, holdings
        self._scratch = Buffers(CHUNK_BYTES)
        self._cancelled: FormId | None = None
        # Counts for the form that is being applied: chunks that are written, and all chunks.
        self.written, self.chunks = 0, 0

    def cancel(self, form: FormId) -> None:
        """Make the running `apply` of this form end with ApplyCancelled, unless it is done."""
        self._cancelled = form
        self._holdings.ring()

    async def apply(
        self, form: FormId, stands: Digest | None = None
    ) -> SnapshotReady | ApplyRejected | ApplyCancelled:
        """Apply a form; returns the outcome. The current slot has changed only if the outcome is SnapshotReady.

        stands: as in ApplyForm.
        """
        try:
            return await self._apply(form, stands)
        except (IntegrityFault, StoreFault) as fault:
            # The files of a dropped form are deleted, so this fault says nothing about the form.
            if self._ends(form):
                return ApplyCancelled(form)
            log.warning("apply failed form=%s reason=%s", form, fault)
            return ApplyRejected(form, str(fault))
        finally:
            self._cancelled = None

    async def _apply(
        self, form: FormId, stands: Digest | None
    ) -> SnapshotReady | ApplyRejected | ApplyCancelled:
        known = await self._until(form, lambda _: True)
        if known is not None and stands is not None:
            # If the spare slot already has this snapshot, switching the slots is enough.
            facts = known.facts
            again = await asyncio.to_thread(
                self._slots.take_again, stands, facts.epoch, facts.version
            )
            if again is not None:
                return SnapshotReady(form, facts.version, stands, str(again.directory))
        if await self._until(form, lambda index: bool(index.files)) is None:
            return ApplyCancelled(form)
        async with self._holdings.using(form) as index:
            base = await asyncio.to_thread(self._slots.current)
            if index.facts.base_digest is not None and not _is_base(base, index):
                return ApplyRejected(
                    form, "the current slot is not the base of this delta", lacks_base=True
                )
            writer = await self._holdings.with_room(form, partial(self._slots.begin, index.files))
            work = _Work(form, index, self._store, base, writer, self._scratch)
            self.written, self.chunks = 0, len(chunk_layout(index.files))
            try:
                return await self._build(form, work)
            except (IntegrityFault, StoreFault):
                await asyncio.to_thread(writer.end)
                raise

    async def _build(
        self, form: FormId, work: "_Work"
    ) -> SnapshotReady | ApplyRejected | ApplyCancelled:
        """Write all chunks and commit. The writer has ended on return, but not after an exception."""
        await self._write_all(form, work)
        if work.fault is not None:
            raise work.fault
        if not work.done:
            await asyncio.to_thread(work.writer.end)
            return ApplyCancelled(form)
        if work.lacking:
            await asyncio.to_thread(work.writer.end)
            reason = f"the current slot is damaged under {len(work.lacking)} delta chunks"
            return ApplyRejected(form, reason, lacks_base=True)
        facts, manifest = work.index.facts, await asyncio.to_thread(work.index.manifest)
        current = await asyncio.to_thread(work.writer.commit, manifest, facts.epoch, facts.version)
        return SnapshotReady(form, facts.version, manifest.digest, str(current.directory))

    async def _write_all(self, form: FormId, work: "_Work") -> None:
        """Write arriving chunks in several threads until all are written, the form is dropped, or a write fails."""
        free = asyncio.Semaphore(chunk_threads())
        async with asyncio.TaskGroup() as tasks:
            while not (work.done or work.fault or self._ends(form)):
                if batch := work.take(self._holdings):
                    await free.acquire()
                    tasks.create_task(self._write(work, batch, free))
                else:
                    await self._holdings.changed()

    async def _write(
        self, work: "_Work", batch: list[ChunkRecord], free: asyncio.Semaphore
    ) -> None:
        try:
            await asyncio.to_thread(work.write, batch)
            self.written += len(batch)
        except FramesDamaged as fault:
            self._holdings.lose(fault)
            work.put_back(batch)
        except _CopyDamaged as fault:
            log.warning("%s", fault)
            work.put_back(batch)
        except (IntegrityFault, StoreFault) as fault:
            work.fault = work.fault or fault
        finally:
            free.release()
            work.writing -= 1
            # Wake the loop that takes batches, because nothing else may wake it.
            if not work.writing:
                self._holdings.ring()

    def _ends(self, form: FormId) -> bool:
        """Whether the form is no longer wanted: cancelled or dropped."""
        return form == self._cancelled or self._holdings.dropped(form)

    async def _until(self, form: FormId, known: Callable[[FormIndex], bool]) -> FormIndex | None:
        """Wait until the form's index satisfies `known`. None: the form was cancelled or dropped."""
        while not self._ends(form):
            index = self._holdings.index(form)
            if index is not None and known(index):
                return index
            await self._holdings.changed()
        return None


def _is_base(current: CurrentSlot | None, index: FormIndex) -> bool:
    return current is not None and current.manifest.digest == index.facts.base_digest


@dataclass(slots=True)
class _Pending:
    """A chunk still to be written.

    missing: its missing frames in reverse order. `arrived` pops those that are on disk from the end, so
    a frame is checked again only while it is the first missing one.
    """

    record: ChunkRecord
    missing: list[FrameId]

    def arrived(self, on_disk: Callable[[FrameId], bool]) -> bool:
        while self.missing and on_disk(self.missing[-1]):
            self.missing.pop()
        return not self.missing


class _Work:
    """The chunks of one form that must still be written."""

    def __init__(
        self,
        form: FormId,
        index: FormIndex,
        store: FrameStore,
        base: CurrentSlot | None,
        writer: SlotWriter,
        scratch: Buffers,
    ) -> None:
        self._form, self._store, self._base = form, store, base
        self.index, self.writer = index, writer
        self._scratch = scratch
        self._base_digests: dict[Chunk, Digest] = {}
        if base is not None:
            self._base_digests = dict(
                zip(base.manifest.chunks, base.manifest.chunk_digests, strict=True)
            )
        # Chunks whose base is damaged.
        self.lacking: set[ChunkId] = set()
        # The first fault that ends the work.
        self.fault: IntegrityFault | StoreFault | None = None
        # Batches that were taken and are not written yet.
        self.writing = 0
        self._next_segment = SegmentId(0)
        # Chunks of the segments whose tables are known, in order.
        self._pending: dict[ChunkId, _Pending] = {}

    @property
    def done(self) -> bool:
        return (
            self.index.complete
            and self._next_segment == self.index.segment_count
            and not self._pending
            and not self.writing
        )

    def take(self, holdings: FrameHoldings) -> list[ChunkRecord]:
        """Take up to two chunks that can be written now. The caller counts `writing` down
        when they are written or put back.
        """
        table = self.index.table(self._next_segment)
        while table is not None:
            self._pending.update((record.chunk, _Pending(record, [])) for record in table.records)
            # Reversed, because _Pending pops a chunk's first frames from the end of its list.
            for span in reversed(self.index.spans(self._next_segment)):
                self._pending[span.chunk].missing.append(span.frame)
            self._next_segment = SegmentId(self._next_segment + 1)
            table = self.index.table(self._next_segment)
        on_disk = partial(holdings.on_disk, self._form)
        # Check only the first pending chunks for completeness: frames arrive nearly in order.
        first = islice(self._pending.values(), 4 * CHUNK_THREADS_MAX)
        ready = (
            each.record for each in first if each.arrived(on_disk) or self._copied(each.record)
        )
        # A thread writes two chunks in one call: few enough that cancelling takes well under a
        # second.
        batch = list(islice(ready, 2))
        for record in batch:
            del self._pending[record.chunk]
        self.writing += bool(batch)
        return batch

    def put_back(self, records: Iterable[ChunkRecord]) -> None:
        """Queue these chunks again, at the front; their frames may have to arrive again."""
        frames = {
            each: [span.frame for span in self.index.chunk_spans(each.chunk)] for each in records
        }
        again = {
            record.chunk: _Pending(record, missing[::-1]) for record, missing in frames.items()
        }
        self._pending = again | self._pending

    def write(self, records: Iterable[ChunkRecord]) -> None:
        """Write these chunks. Blocking.

        The writer hashes every result. Frames and base are hashed only if a result is wrong.
        """
        with self._scratch.one() as scratch:
            for record in records:
                self._write(record, scratch)

    def _write(self, record: ChunkRecord, scratch: memoryview) -> None:
        try:
            if self._copied(record):
                self._copy(record, scratch)
            else:
                self._decode(record, scratch)
        except LacksBase:
            self.lacking.add(record.chunk)

    def _copied(self, record: ChunkRecord) -> bool:
        """Whether the current slot holds the same bytes in the same place."""
        return self._base_digests.get(self._place(record)) == record.result

    def _copy(self, record: ChunkRecord, scratch: memoryview) -> None:
        """Copy a chunk from the current slot. _CopyDamaged: the chunk is damaged there, and must be decoded instead."""
        data = self._read_base(record, scratch) or b""
        try:
            self.writer.write_chunk(record.chunk, data, record.result)
        except IntegrityFault:
            del self._base_digests[self._place(record)]
            raise _CopyDamaged(f"chunk {record.chunk} is damaged in the current slot") from None

    def _decode(self, record: ChunkRecord, scratch: memoryview) -> None:
        """Decode a chunk from its frames. FramesDamaged: the result is wrong because frames on disk are damaged."""
        spans = self.index.chunk_spans(record.chunk)
        try:
            self._put(record, self._store.read_encoded_chunk(self._form, spans), scratch)
        except IntegrityFault:
            # The first read may have failed although the disk is right, so verify every frame now.
            self._put(record, self._store.verify(self._form, spans), scratch)

    def _put(self, record: ChunkRecord, payload: bytes, scratch: memoryview) -> None:
        base = self._read_base(record, scratch) if record.needs_base else None
        try:
            data = decode_record(record, payload, self._place(record).length, base, overwrite=True)
            self.writer.write_chunk(record.chunk, data, record.result)
        except IntegrityFault:
            # If the delta was made from another base than this one, blame the base.
            if record.needs_base:
                require_base(record, self._read_base(record, scratch))
            raise

    def _read_base(self, record: ChunkRecord, scratch: memoryview) -> memoryview | None:
        """The chunk in the current slot. It is read each time, because decoding overwrites the base."""
        place = self._place(record)
        if self._base is None or place not in self._base_digests:
            return None
        # A chunk that cannot be read is treated like a damaged one.
        with suppress(IntegrityFault, StoreFault):
            return read_chunk_into(self._base.directory, place, scratch)
        return None

    def _place(self, record: ChunkRecord) -> Chunk:
        place = self.index.chunk(record.chunk)
        assert place is not None, "the first table is known"
        return place
