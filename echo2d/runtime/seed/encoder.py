"""Encodes one snapshot directory into the segments of one form.

Each chunk is read once: its digest, its sum and its encoding come from the same bytes. Calls block,
so make them in a thread; the encoder starts a few threads of its own.
"""

from collections.abc import Callable, Generator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Protocol

from echo2d.core.base.canonical import Buffer
from echo2d.core.base.ids import ChunkId, Digest
from echo2d.core.weights.encoder import FormBuilder, Segment
from echo2d.core.weights.form import (
    SEGMENT_BYTES_MAX,
    ChunkRecord,
    FormFacts,
    base_sum,
    encode_records,
)
from echo2d.core.weights.manifest import CHUNK_BYTES, Chunk, FileEntry, Manifest, chunk_layout
from echo2d.core.weights.signed_index import FormTotals
from echo2d.store.snapshots import read_chunk_into, scan_snapshot
from echo2d.threads import Buffers, in_threads

EncodedRecord = tuple[ChunkRecord, bytes]
EncodedRecords = tuple[EncodedRecord, EncodedRecord]  # the sent and the kept one (`encode_records`)


class Base(Protocol):
    """The source of a delta form (`delta_bases.py`). Used from several threads."""

    def encode(self, position: ChunkId, place: Chunk, new: Callable[[], Buffer]) -> EncodedRecords:
        """Encode the chunk at this place; new() reads its new bytes.

        IntegrityFault, StoreFault: new() cannot read the chunk.
        """


class KeptForm:
    """Builds the segments of the delta that is kept, beside those that are sent."""

    def __init__(self, builder: FormBuilder) -> None:
        self._builder = builder
        self._new: list[Segment] = []
        self.digests: list[Digest] = []  # of the tables of all segments
        self.waiting_bytes = 0  # of payload that `take` has not returned yet

    def add(self, record: ChunkRecord, payload: bytes) -> None:
        full = self._builder.add(record, payload)
        self.waiting_bytes += len(payload)
        if full is not None:
            self._new.append(full)
            self.digests.append(full.table.digest)

    def finish(self) -> None:
        last = self._builder.finish()
        self._new.append(last)
        self.digests.append(last.table.digest)

    def take(self) -> list[Segment]:
        """The segments since the last call."""
        taken, self._new = self._new, []
        self.waiting_bytes -= sum(segment.table.wire_bytes for segment in taken)
        return taken

    @property
    def wire_bytes(self) -> int:
        """The bytes of the whole form on the wire; known after the last segment."""
        return self._builder.totals().wire_bytes


class Encoder:
    """directory: the snapshot. base: None for a full form. keep: whether to build also the form that is
    kept, from which other deltas are composed. OperatorFault: the directory is not a snapshot.
    """

    def __init__(
        self,
        facts: FormFacts,
        directory: Path,
        base: Base | None,
        *,
        keep: bool = False,
        segment_bytes: int = SEGMENT_BYTES_MAX,
    ) -> None:
        self._directory, self._base = directory, base
        self._buffers = Buffers(CHUNK_BYTES)
        self._sums: dict[Chunk, bytes] = {}
        self._files: tuple[FileEntry, ...] = scan_snapshot(directory)
        self._builder = FormBuilder(facts, self._files, segment_bytes=segment_bytes)
        self.kept = (
            KeptForm(FormBuilder(facts, self._files, segment_bytes=segment_bytes)) if keep else None
        )

    def segments(self) -> Generator[Segment, None, None]:
        """All segments, in order. IntegrityFault, StoreFault: a file can no longer be read."""
        # If this generator is closed early, the threads end, too.
        with closing(in_threads(self._encode, enumerate(chunk_layout(self._files)))) as encoded:
            for sent, kept in encoded:
                if self.kept is not None:
                    # The kept form may be six times as large as the sent one, and waits in memory.
                    if self.kept.waiting_bytes > SEGMENT_BYTES_MAX and self._builder.is_open:
                        yield self._builder.cut()
                    self.kept.add(*kept)
                full = self._builder.add(*sent)
                if full is not None:
                    yield full
        if self.kept is not None:
            self.kept.finish()
        yield self._builder.finish()

    def totals(self) -> FormTotals:
        """The form's totals. Call it after the last segment."""
        return self._builder.totals()

    def manifest(self) -> Manifest:
        """The snapshot's manifest. Call it after the last segment."""
        return self._builder.manifest()

    def sums(self) -> dict[Chunk, bytes] | None:
        """`base_sum` of every chunk, after the last segment; None if some chunks were never read.

        A composed form may take a chunk from kept deltas without reading it.
        """
        return self._sums if len(self._sums) == len(chunk_layout(self._files)) else None

    def _encode(self, numbered: tuple[int, Chunk]) -> EncodedRecords:
        position, chunk = ChunkId(numbered[0]), numbered[1]
        with self._buffers.one() as buffer:
            new = partial(self._read, chunk, buffer)
            return (
                encode_records(position, new())
                if self._base is None
                else self._base.encode(position, chunk, new)
            )

    def _read(self, chunk: Chunk, buffer: memoryview) -> Buffer:
        data = read_chunk_into(self._directory, chunk, buffer)
        self._sums[chunk] = base_sum(data)
        return data
