"""Verifies what a receiver learns about one form from signed roots, unsigned pages and segment tables.

    unknown segment --root (signed)--------------------------> signed digest --table--> frames known
          \\--page (claimed)--running digest of a root fits--->/

Each fact is checked when it arrives. An `IntegrityFault` leaves the index as it was, except that
false pages are dropped. The index knows the length and digest of every frame of a known segment, and
at the end the manifest. Not here: signatures and the publish_seq rule, which the caller checks; which
frames are on disk (`relay/frame_set`); the bytes of frames.
"""

from collections.abc import Sequence

from echo2d.core.base.canonical import digest_of, require
from echo2d.core.base.ids import ChunkId, Digest, FrameId, SegmentId, index_of, is_table, segment_of
from echo2d.core.weights.delta import ChunkMode
from echo2d.core.weights.form import (
    FormFacts,
    FrameSpan,
    SegmentTable,
    frame_layout,
)
from echo2d.core.weights.manifest import Chunk, FileEntry, Manifest, chunk_layout
from echo2d.core.weights.signed_index import PAGE_SEGMENTS_MAX, FormTotals, Root, running_digest


class FormIndex:
    """The index of one form, made from the first root whose signature was verified."""

    def __init__(self, root: Root) -> None:
        self._newest = root
        self._signed: dict[SegmentId, Digest] = {}
        self._claimed: dict[SegmentId, Digest] = {}
        self._tables: dict[SegmentId, SegmentTable] = {}
        self._table_bytes: dict[SegmentId, int] = {}
        self._spans: dict[SegmentId, tuple[FrameSpan, ...]] = {}
        self._segment_of_chunk: dict[ChunkId, SegmentId] = {}
        self._layout: tuple[Chunk, ...] = ()
        self.accept_root(root)

    # --- what comes in

    def accept_root(self, root: Root) -> None:
        """Add a root whose signature was verified. Old and repeated roots are allowed, but no
        contradicting ones.
        """
        require(root.facts == self.facts, "a root contradicts the form's facts")
        named = dict(
            zip(
                map(SegmentId, range(root.first_segment, root.segment_count)),
                root.segments,
                strict=True,
            )
        )
        known = all(
            self._signed.get(segment, digest) == digest for segment, digest in named.items()
        )
        require(known, "a root contradicts an earlier one")
        older, newer = sorted(
            (self._newest, root), key=lambda each: (each.segment_count, each.totals is not None)
        )
        require(older.totals in (None, newer.totals), "a root comes after the form's last")
        require(
            older.segment_count < newer.segment_count or older.running == newer.running,
            "roots contradict",
        )
        self._settle(newer, self._signed | named, self._claimed)

    def accept_page(self, start: SegmentId, digests: Sequence[Digest]) -> None:
        """Add unsigned digests of the segments start, start + 1, ...

        They are trusted once no segment is missing and the running digest of the newest root fits.
        """
        require(len(digests) <= PAGE_SEGMENTS_MAX, "a page of segment digests is too long")
        claimed = dict(self._claimed)
        for position, digest in enumerate(digests, start):
            segment = SegmentId(position)
            require(self._signed.get(segment, digest) == digest, "a page contradicts a signed root")
            if segment < self._newest.segment_count and segment not in self._signed:
                claimed[segment] = digest
        fits = self._settle(self._newest, self._signed, claimed)
        require(fits, "pages of segment digests do not fit the running digest")

    def accept_table(self, segment: SegmentId, data: bytes) -> SegmentTable:
        """Add the table of a segment whose digest is known (see `table_digest`)."""
        require(
            digest_of(data) == self._signed.get(segment),
            f"the table of segment {segment} has the wrong digest",
        )
        table = SegmentTable.decode(data)
        require(table.segment == segment, "a table names another segment")
        spans = frame_layout(table, self.facts.frame_bytes)
        self._check_place(table)
        self._tables[segment] = table
        self._table_bytes[segment] = len(data)
        self._spans[segment] = spans
        self._segment_of_chunk.update((record.chunk, segment) for record in table.records)
        self._layout = self._layout or chunk_layout(table.files)
        return table

    # --- what is known

    @property
    def facts(self) -> FormFacts:
        return self._newest.facts

    @property
    def segment_count(self) -> int:
        """The number of segments that the newest root covers."""
        return self._newest.segment_count

    @property
    def totals(self) -> FormTotals | None:
        """The form's totals; None until its last root has arrived."""
        return self._newest.totals

    def missing_segment(self) -> SegmentId | None:
        """The first segment whose digest must be requested in pages; None: all up to the newest root
        are known.
        """
        known = self._signed.keys() | self._claimed.keys()
        return next(
            (SegmentId(each) for each in range(self.segment_count) if each not in known), None
        )

    @property
    def complete(self) -> bool:
        """Whether all segments and their tables are known."""
        return self.totals is not None and len(self._tables) == self.segment_count

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """The files; empty until the first segment's table has arrived."""
        first = self._tables.get(SegmentId(0))
        return () if first is None else first.files

    def table_digest(self, segment: SegmentId) -> Digest | None:
        return self._signed.get(segment)

    def table(self, segment: SegmentId) -> SegmentTable | None:
        return self._tables.get(segment)

    def spans(self, segment: SegmentId) -> tuple[FrameSpan, ...]:
        """All payload frames of a segment in order; empty until its table has arrived, or if there are
        none.
        """
        return self._spans.get(segment, ())

    def length(self, frame: FrameId) -> int | None:
        """The length of a frame. The length of a table is known once the table has arrived."""
        if is_table(frame):
            return self._table_bytes.get(segment_of(frame))
        span = self.span(frame)
        return None if span is None else span.length

    def span(self, frame: FrameId) -> FrameSpan | None:
        """The place of a payload frame; None for tables and for frames that are not known yet."""
        spans, index = self.spans(segment_of(frame)), index_of(frame)
        return spans[index - 1] if 0 < index <= len(spans) else None

    def chunk(self, chunk: ChunkId) -> Chunk | None:
        """The place of the chunk's bytes in the files; None until the first segment's table has arrived,
        or if there is no such chunk.
        """
        return self._layout[chunk] if chunk < len(self._layout) else None

    def chunk_spans(self, chunk: ChunkId) -> tuple[FrameSpan, ...]:
        """The frames of an encoded chunk in order; empty if the chunk is unknown or has no payload."""
        segment = self._segment_of_chunk.get(chunk)
        return (
            ()
            if segment is None
            else tuple(span for span in self._spans[segment] if span.chunk == chunk)
        )

    def manifest(self) -> Manifest:
        """The manifest of a complete form. IntegrityFault: its digest is not the signed one."""
        assert self.complete
        assert self.totals is not None
        tables = [self._tables[SegmentId(each)] for each in range(self.segment_count)]
        manifest = Manifest(
            self.files, tuple(record.result for table in tables for record in table.records)
        )
        wire_bytes = sum(table.wire_bytes for table in tables) + sum(self._table_bytes.values())
        found = FormTotals(wire_bytes, manifest.full_bytes, manifest.digest)
        require(found == self.totals, "the tables do not add up to the signed snapshot")
        return manifest

    def check(self) -> None:
        """Assert all invariants."""
        assert not self._signed.keys() & self._claimed.keys()
        assert all(segment < self.segment_count for segment in (*self._signed, *self._claimed))
        assert self._tables.keys() <= self._signed.keys()
        assert self._tables.keys() == self._spans.keys() == self._table_bytes.keys()
        assert all(table.digest == self._signed[segment] for segment, table in self._tables.items())
        if self.missing_segment() is None:
            assert not self._claimed

    # --- how it is judged

    def _settle(
        self, newest: Root, signed: dict[SegmentId, Digest], claimed: dict[SegmentId, Digest]
    ) -> bool:
        """Adopt the new state. Once no segment is missing, the running digest decides whether the
        claimed digests are right.

        False: they were wrong, and have been dropped.
        """
        claimed = {segment: digest for segment, digest in claimed.items() if segment not in signed}
        both, fits = signed | claimed, True
        if len(both) == newest.segment_count:
            fits = (
                running_digest([both[SegmentId(each)] for each in range(newest.segment_count)])
                == newest.running
            )
            require(fits or bool(claimed), "a root's segments do not fit its running digest")
            signed, claimed = (both if fits else signed), {}
        self._newest, self._signed, self._claimed = newest, signed, claimed
        return fits

    def _check_place(self, table: SegmentTable) -> None:
        """Check that the table fits the form's kind, the tables next to it and the files."""
        modes = {record.mode for record in table.records}
        require(
            self.facts.kind != "full" or modes <= {ChunkMode.RAW, ChunkMode.FULL},
            "a full form needs a base",
        )
        before = self._tables.get(SegmentId(table.segment - 1))
        after = self._tables.get(SegmentId(table.segment + 1))
        start = 0 if table.segment == 0 else None if before is None else before.end_chunk
        require(
            start is None or table.first_chunk == start, "a table does not follow the one before it"
        )
        require(
            after is None or after.first_chunk == table.end_chunk,
            "a table does not precede the one after it",
        )
        if table.files or self._layout:
            layout = self._layout or chunk_layout(table.files)
            for each in (table, *(self._tables.values() if table.files else ())):
                _check_lengths(each, layout)


def _check_lengths(table: SegmentTable, layout: tuple[Chunk, ...]) -> None:
    require(table.end_chunk <= len(layout), "a table names chunks beyond the files")
    for record in table.records:
        length = layout[record.chunk].length
        fits = (
            record.wire_bytes == length
            if record.mode == ChunkMode.RAW
            else record.wire_bytes < length
        )
        require(fits, f"chunk {record.chunk} is longer on the wire than in its file")
