"""Chunks become segments within the limits of bytes and of the table."""

import pytest

from echo2d.core.base.canonical import digest_of
from echo2d.core.base.ids import ChunkId
from echo2d.core.weights.delta import ChunkMode
from echo2d.core.weights.encoder import FormBuilder
from echo2d.core.weights.form import (
    FRAME_BYTES_MAX,
    NO_BASE,
    RECORD_TABLE_BYTES,
    SEGMENT_BYTES_MAX,
    SEGMENT_BYTES_MIN,
    SEGMENT_GROWTH,
    TABLE_BYTES_MAX,
    ChunkRecord,
    encode_record,
)
from echo2d.core.weights.manifest import CHUNK_BYTES, SMALL_SEGMENTS_MAX, FileEntry
from tests.support.encodings import build_form, facts

ZEROS = bytes(CHUNK_BYTES)


def segment_sizes(wire_bytes: int, chunks: int) -> list[int]:
    """The wire bytes of each segment of a form whose chunks all take `wire_bytes`."""
    builder = FormBuilder(facts(), (FileEntry("a.json", chunks * CHUNK_BYTES, 0),))
    sizes, payload = list[int](), ZEROS[:wire_bytes]
    for chunk in range(chunks):
        record = ChunkRecord(ChunkId(chunk), ChunkMode.RAW, wire_bytes, NO_BASE, digest_of(b""))
        full = builder.add(record, payload)
        if full is not None:
            sizes.append(full.table.wire_bytes)
            assert full.table.files == (builder._files if len(sizes) == 1 else ())
            builder.check()
    return [*sizes, builder.finish().table.wire_bytes]


@pytest.mark.parametrize("wire_bytes", [50_000, CHUNK_BYTES // 3, CHUNK_BYTES])
def test_segments_grow_to_sixty_four_mebibytes(wire_bytes: int) -> None:
    sizes = segment_sizes(wire_bytes, 400 * (1 << 20) // wire_bytes)
    assert sizes[0] < SEGMENT_BYTES_MIN + wire_bytes
    before = [sum(sizes[:place]) for place in range(len(sizes))]
    for size, sent in zip(sizes, before, strict=True):
        # The tables before it count, too.
        assert size < max(SEGMENT_BYTES_MIN, 1.01 * sent * SEGMENT_GROWTH) + wire_bytes
    large = [size for size in sizes if size > SEGMENT_BYTES_MAX - CHUNK_BYTES]
    assert max(large) <= SEGMENT_BYTES_MAX
    assert sizes.index(large[0]) <= SMALL_SEGMENTS_MAX // 2


def test_a_full_table_closes_a_segment() -> None:
    count = TABLE_BYTES_MAX // RECORD_TABLE_BYTES + 1
    builder = FormBuilder(facts("delta"), (FileEntry("a.json", count * CHUNK_BYTES, 0),))
    closed = [
        full
        for chunk in range(count)
        if (
            full := builder.add(
                ChunkRecord(ChunkId(chunk), ChunkMode.SAME, 0, bytes(range(16)), digest_of(b"")),
                b"",
            )
        )
    ]
    builder.check()
    last = builder.finish()
    (first,) = closed
    assert TABLE_BYTES_MAX - 256 < len(first.table.encode()) <= TABLE_BYTES_MAX
    assert len(first.table.records) + len(last.table.records) == count


def test_frames_contain_the_encoded_chunks() -> None:
    contents = {"a.json": b"{}" * 70_000, "b.txt": b"hello"}
    form = build_form(facts(), contents)
    (segment,) = form.segments
    carried = b"".join(bytes(payload) for _, payload in segment.frames(form.facts.frame_bytes))
    assert carried == b"".join(
        encode_record(ChunkId(0), contents[path])[1] for path in sorted(contents)
    )
    for span, payload in segment.frames(form.facts.frame_bytes):
        assert (len(payload), digest_of(payload)) == (span.length, span.digest)


def test_totals_count_frames_and_tables() -> None:
    contents = {f"{index:02d}.txt": bytes([index]) * 50_000 for index in range(9)}
    form = build_form(facts(), contents, segment_bytes=1000)
    totals = form.roots[-1].totals
    assert totals is not None
    assert totals.wire_bytes == sum(
        each.table.wire_bytes + len(each.table.encode()) for each in form.segments
    )
    assert totals.full_bytes == 9 * 50_000
    assert totals.snapshot == form.manifest.digest
    assert len(form.segments) > 1


def test_segments_cannot_be_larger_than_the_limit() -> None:
    with pytest.raises(AssertionError):
        FormBuilder(facts(), (), segment_bytes=SEGMENT_BYTES_MAX + 1)


def test_the_largest_frames_fit_the_numbering() -> None:
    assert SEGMENT_BYTES_MAX // FRAME_BYTES_MAX < 1 << 20
