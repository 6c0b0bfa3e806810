"""A form becomes a snapshot: its chunks are decoded as they complete, written into the spare slot, verified, flipped.

Runs while the form is still arriving and while the engines serve the current slot, which is only read: a chunk that it
holds already is copied, and it is the base of delta forms. Reading, decoding and writing happen in threads.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice

from echo2d.core.base.ids import ChunkId, Digest, FormId, FrameId, SegmentId
from echo2d.core.weights.encoding import ChunkRecord, LacksBase, decode_record
from echo2d.core.weights.manifest import CHUNK_BYTES, Chunk
from echo2d.core.weights.verifier import FormIndex
from echo2d.core.worker.events import ApplyCancelled, ApplyRejected, SnapshotReady
from echo2d.errors import IntegrityFault, StoreFault
from echo2d.runtime.peer.frame_holdings import FrameHoldings
from echo2d.store.frames import FramesDamaged, FrameStore
from echo2d.store.slots import CurrentSlot, SlotStore, SlotWriter
from echo2d.store.snapshots import read_chunk_into

LOOKAHEAD_CHUNKS = 16  # chunks looked at for being complete, in order; frames come nearly in order
BATCH_CHUNKS = 4  # written in one go in a thread, so that cancelling takes well under a second

log = logging.getLogger("echo2d.worker")


class _CopyDamaged(IntegrityFault):
    """A chunk of the current slot is not what its manifest says."""


class _Scratch:
    """Memory of a chunk for each thread that writes just now, used again: fresh memory costs more than decoding."""

    def __init__(self) -> None:
        self._free: list[memoryview] = []

    @contextmanager
    def chunk(self) -> Iterator[memoryview]:
        try:
            taken = self._free.pop()
        except IndexError:
            taken = memoryview(bytearray(CHUNK_BYTES))
        try:
            yield taken
        finally:
            self._free.append(taken)


class SnapshotBuilder:
    """One form at a time: `apply` returns before the next one begins."""

    def __init__(self, slots: SlotStore, store: FrameStore, holdings: FrameHoldings) -> None:
        self._slots, self._store, self._holdings = slots, store, holdings
        self._scratch = _Scratch()
        self._cancelled: FormId | None = None

    def cancel(self, form: FormId) -> None:
        """`apply` of this form, which was begun, ends soon with ApplyCancelled, unless it is done before."""
        self._cancelled = form

    async def apply(
        self, form: FormId, stands: Digest | None = None
    ) -> SnapshotReady | ApplyRejected | ApplyCancelled:
        """What became of it. The current slot changes with SnapshotReady and not otherwise. stands: as in ApplyForm."""
        try:
            return await self._apply(form, stands)
        except (IntegrityFault, StoreFault) as fault:
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
                    form, "the base of the delta does not stand here", lacks_base=True
                )
            writer = await self._holdings.with_room(form, lambda: self._slots.begin(index.files))
            work = _Work(form, index, self._store, base, writer, self._scratch)
            while not work.done:
                batch = work.take(self._holdings)
                if self._ends(form):
                    await asyncio.to_thread(writer.end)
                    return ApplyCancelled(form)
                if batch:
                    await self._write(work, batch)
                else:
                    await self._holdings.changed()
            if work.lacking:
                await asyncio.to_thread(writer.end)
                reason = f"{len(work.lacking)} chunks are deltas from bytes that are damaged here"
                return ApplyRejected(form, reason, lacks_base=True)
            facts = index.facts
            manifest = await asyncio.to_thread(index.manifest)
            current = await asyncio.to_thread(writer.commit, manifest, facts.epoch, facts.version)
        return SnapshotReady(form, facts.version, manifest.digest, str(current.directory))

    async def _write(self, work: "_Work", batch: list[ChunkRecord]) -> None:
        try:
            await asyncio.to_thread(work.write, batch)
        except FramesDamaged as fault:
            self._holdings.lose(fault)
            work.put_back(batch)
        except _CopyDamaged as fault:
            log.warning("%s", fault)
            work.put_back(batch)

    def _ends(self, form: FormId) -> bool:
        """Whether nobody wants it any more."""
        return form == self._cancelled or self._holdings.dropped(form)

    async def _until(self, form: FormId, known: Callable[[FormIndex], bool]) -> FormIndex | None:
        """Waits for so much of it to be known. None: cancelled, or dropped."""
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
    """A chunk that is still to be written. missing: its frames in reverse order; those at the end may be held."""

    record: ChunkRecord
    missing: list[FrameId]

    def arrived(self, on_disk: Callable[[FrameId], bool]) -> bool:
        while self.missing and on_disk(self.missing[-1]):
            self.missing.pop()
        return not self.missing


class _Work:
    """The chunks of one form that are still to be written. lacking: those whose base is damaged here."""

    def __init__(
        self,
        form: FormId,
        index: FormIndex,
        store: FrameStore,
        base: CurrentSlot | None,
        writer: SlotWriter,
        scratch: _Scratch,
    ) -> None:
        self._form, self._index, self._store, self._base, self._writer = (
            form,
            index,
            store,
            base,
            writer,
        )
        self._scratch = scratch
        self._base_digests: dict[Chunk, Digest] = {}
        if base is not None:
            self._base_digests = dict(
                zip(base.manifest.chunks, base.manifest.chunk_digests, strict=True)
            )
        self.lacking: set[ChunkId] = set()
        self._next_segment = SegmentId(0)
        self._pending: dict[ChunkId, _Pending] = {}  # of known segments, in order

    @property
    def done(self) -> bool:
        return (
            self._index.complete
            and self._next_segment == self._index.segment_count
            and not self._pending
        )

    def take(self, holdings: FrameHoldings) -> list[ChunkRecord]:
        """Up to BATCH_CHUNKS chunks that can be written now."""
        table = self._index.table(self._next_segment)
        while table is not None:
            self._pending.update((record.chunk, _Pending(record, [])) for record in table.records)
            for span in reversed(self._index.spans(self._next_segment)):
                self._pending[span.chunk].missing.append(span.frame)
            self._next_segment = SegmentId(self._next_segment + 1)
            table = self._index.table(self._next_segment)
        on_disk = partial(holdings.on_disk, self._form)
        first = islice(self._pending.values(), LOOKAHEAD_CHUNKS)
        ready = (
            each.record for each in first if each.arrived(on_disk) or self._copied(each.record)
        )
        batch = list(islice(ready, BATCH_CHUNKS))
        for record in batch:
            del self._pending[record.chunk]
        return batch

    def put_back(self, records: Iterable[ChunkRecord]) -> None:
        """They are to be written once their frames are held again."""
        frames = {
            each: [span.frame for span in self._index.chunk_spans(each.chunk)] for each in records
        }
        again = {
            record.chunk: _Pending(record, missing[::-1]) for record, missing in frames.items()
        }
        self._pending = again | self._pending

    def write(self, records: Iterable[ChunkRecord]) -> None:
        """Blocking. The writer hashes every result; what it was made from is hashed only where the result is wrong."""
        with self._scratch.chunk() as self._chunk:
            for record in records:
                self._write(record)

    def _write(self, record: ChunkRecord) -> None:
        try:
            if self._copied(record):
                self._copy(record)
            else:
                self._decode(record)
        except LacksBase:
            self.lacking.add(record.chunk)

    def _copied(self, record: ChunkRecord) -> bool:
        """Whether the current slot holds the very same bytes in the same place."""
        return self._base_digests.get(self._place(record)) == record.result

    def _copy(self, record: ChunkRecord) -> None:
        """_CopyDamaged: the current slot has rotted there; from now on the chunk is decoded."""
        data = self._read_base(record) or b""
        try:
            self._writer.write_chunk(record.chunk, data, record.result)
        except IntegrityFault:
            del self._base_digests[self._place(record)]
            raise _CopyDamaged(f"chunk {record.chunk} is damaged in the current slot") from None

    def _decode(self, record: ChunkRecord) -> None:
        """FramesDamaged: that is why the result is wrong."""
        spans = self._index.chunk_spans(record.chunk)
        try:
            self._put(record, self._store.read_encoded_chunk(self._form, spans))
        except IntegrityFault:  # what was read once may be wrong, and the disk still right
            self._put(record, self._store.verify(self._form, spans))

    def _put(self, record: ChunkRecord, payload: bytes) -> None:
        base = self._read_base(record) if record.needs_base else None
        data = decode_record(record, payload, self._place(record).length, base, overwrite=True)
        self._writer.write_chunk(record.chunk, data, record.result)

    def _read_base(self, record: ChunkRecord) -> memoryview | None:
        """Anew each time: who decodes uses it up."""
        place = self._place(record)
        if self._base is None or place not in self._base_digests:
            return None
        with suppress(IntegrityFault, StoreFault):  # as good as damaged
            return read_chunk_into(self._base.directory, place, self._chunk)
        return None

    def _place(self, record: ChunkRecord) -> Chunk:
        place = self._index.chunk(record.chunk)
        assert place is not None, "the first table is known"
        return place
