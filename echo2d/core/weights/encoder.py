"""Builds a form on the sender's side: chunks become segments (`FormBuilder`), segments become roots
(`RootWriter`).

Once a segment has been handed out, only the result digests of its chunks are kept.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from echo2d.core.base.canonical import Buffer, digest_of
from echo2d.core.base.codec import pack
from echo2d.core.base.ids import DIGEST_BYTES, Digest, SegmentId
from echo2d.core.weights.form import (
    RECORD_TABLE_BYTES,
    SEGMENT_BYTES_MAX,
    SEGMENT_BYTES_MIN,
    SEGMENT_GROWTH,
    TABLE_BYTES_MAX,
    ChunkRecord,
    FormFacts,
    FrameSpan,
    SegmentTable,
    frame_layout,
)
from echo2d.core.weights.manifest import FileEntry, Manifest
from echo2d.core.weights.signed_index import ROOT_SEGMENTS_MAX, FormTotals, Root, running_digest

# An upper bound for the format name, numbers and lengths of a table; about 60 are used.
_TABLE_HEAD_BYTES = 128


@dataclass(frozen=True, slots=True)
class Segment:
    """A finished segment: its table and the payloads of its chunks."""

    table: SegmentTable
    payloads: tuple[bytes, ...]

    def frames(self, frame_bytes: int) -> Iterator[tuple[FrameSpan, memoryview]]:
        views = {
            record.chunk: memoryview(payload)
            for record, payload in zip(self.table.records, self.payloads, strict=True)
        }
        for span in frame_layout(self.table, frame_bytes):
            yield span, views[span.chunk][span.offset_in_chunk : span.offset_in_chunk + span.length]


class FormBuilder:
    """Collects the chunks of a form, in order, into segments.

    A segment closes before the next chunk if it has at least SEGMENT_BYTES_MIN bytes and
    SEGMENT_GROWTH of all bytes before it, or if the chunk would bring it above SEGMENT_BYTES_MAX.
    segment_bytes: replaces SEGMENT_BYTES_MAX; lower only in tests.
    """

    def __init__(
        self,
        facts: FormFacts,
        files: Sequence[FileEntry],
        *,
        segment_bytes: int = SEGMENT_BYTES_MAX,
    ) -> None:
        assert segment_bytes <= SEGMENT_BYTES_MAX
        self._facts = facts
        self._files = tuple(files)
        self._segment_bytes = segment_bytes
        self._segment = SegmentId(0)
        self._results: list[Digest] = []
        self._wire_bytes = 0  # of closed segments, tables included
        self._open: list[tuple[ChunkRecord, bytes, list[Digest]]] = []
        self._open_wire_bytes = 0
        self._open_table_bytes = _TABLE_HEAD_BYTES + len(pack(self._files))  # an upper bound

    def add(self, record: ChunkRecord, payload: bytes) -> Segment | None:
        """Add the next chunk. Returns the finished segment if the chunk did not fit into it."""
        assert record.chunk == len(self._results)
        assert record.wire_bytes == len(payload)
        frames = self._frame_digests(payload)
        table_bytes = RECORD_TABLE_BYTES + DIGEST_BYTES * len(frames)
        fits = (
            self._open_wire_bytes < self._enough()
            and self._open_wire_bytes + len(payload) <= self._segment_bytes
            and self._open_table_bytes + table_bytes <= TABLE_BYTES_MAX
        )
        full = self._close() if self._open and not fits else None
        self._open.append((record, payload, frames))
        self._open_wire_bytes += len(payload)
        self._open_table_bytes += table_bytes
        self._results.append(record.result)
        return full

    @property
    def is_open(self) -> bool:
        """Whether some chunks are in no finished segment yet."""
        return bool(self._open)

    def cut(self) -> Segment:
        """Close the open segment although it has too few bytes; another chunk must follow."""
        return self._close()

    def finish(self) -> Segment:
        """Return the last segment, after all chunks have been added."""
        return self._close()

    def manifest(self) -> Manifest:
        """The manifest of the encoded snapshot, after all chunks have been added."""
        return Manifest(self._files, tuple(self._results))

    def totals(self) -> FormTotals:
        """The totals for the last root, after `finish`."""
        assert not self._open
        manifest = self.manifest()
        return FormTotals(self._wire_bytes, manifest.full_bytes, manifest.digest)

    def check(self) -> None:
        """Assert that the open segment keeps its limits and holds the newest chunks in order."""
        chunks = [record.chunk for record, _, _ in self._open]
        assert chunks == list(range(len(self._results)))[len(self._results) - len(chunks) :]
        assert sum(len(payload) for _, payload, _ in self._open) == self._open_wire_bytes
        assert self._open_wire_bytes <= self._segment_bytes or len(chunks) == 1
        *before, _ = [0, *(len(payload) for _, payload, _ in self._open)]
        assert sum(before) < self._enough()
        assert self._open_table_bytes <= TABLE_BYTES_MAX

    def _enough(self) -> float:
        """The bytes with which the open segment is closed."""
        return max(SEGMENT_BYTES_MIN, self._wire_bytes * SEGMENT_GROWTH)

    def _frame_digests(self, payload: Buffer) -> list[Digest]:
        view, size = memoryview(payload), self._facts.frame_bytes
        return [digest_of(view[start : start + size]) for start in range(0, len(view), size)]

    def _close(self) -> Segment:
        records, payloads, frames = zip(*self._open, strict=True)
        files = self._files if self._segment == 0 else ()
        table = SegmentTable(
            self._segment, records, tuple(digest for part in frames for digest in part), files
        )
        self._open, self._open_wire_bytes, self._open_table_bytes = [], 0, _TABLE_HEAD_BYTES
        self._segment = SegmentId(self._segment + 1)
        self._wire_bytes += table.wire_bytes + len(table.encode())
        return Segment(table, payloads)


class RootWriter:
    """Turns the digests of finished segments into roots to be signed."""

    def __init__(self, facts: FormFacts) -> None:
        self._facts = facts
        self._segments: list[Digest] = []
        self._rooted = 0  # segments that are in roots already

    @property
    def segments(self) -> Sequence[Digest]:
        """The digests of all segments so far, which a newcomer gets in pages."""
        return self._segments

    def add(self, table_digest: Digest) -> None:
        self._segments.append(table_digest)

    def take(self, totals: FormTotals | None = None) -> list[Root]:
        """Make roots for the segments added since the last call. With `totals` the last root completes
        the form.
        """
        roots = []
        while self._rooted < len(self._segments):
            end = min(self._rooted + ROOT_SEGMENTS_MAX, len(self._segments))
            roots.append(self._root(end, totals if end == len(self._segments) else None))
        if totals is not None and not roots:
            roots.append(self._root(self._rooted, totals))
        return roots

    def check(self) -> None:
        """Assert that only known segments are in roots."""
        assert self._rooted <= len(self._segments)

    def _root(self, end: int, totals: FormTotals | None) -> Root:
        first, self._rooted = self._rooted, end
        digests = tuple(self._segments[first:end])
        return Root(
            self._facts, SegmentId(first), digests, running_digest(self._segments[:end]), totals
        )
