"""Form facts, records, segment tables, frame layout."""

from dataclasses import replace

import msgpack
import pytest

from echo2d.core.base.canonical import digest_of
from echo2d.core.base.ids import (
    FORM_ID_CHARS,
    ChunkId,
    Digest,
    Epoch,
    PublishSeq,
    RunId,
    SegmentId,
    Version,
    frame_id,
)
from echo2d.core.weights.delta import ChunkMode
from echo2d.core.weights.form import (
    FRAME_BYTES_DEFAULT,
    FRAME_BYTES_MAX,
    FRAME_BYTES_MIN,
    NO_BASE,
    SEGMENT_BYTES_MAX,
    SMALL_FORM_BYTES,
    TABLE_BYTES_MAX,
    ChunkRecord,
    FormFacts,
    LacksBase,
    SegmentTable,
    decode_record,
    encode_record,
    frame_bytes_for,
    frame_layout,
    require_base,
)
from echo2d.core.weights.manifest import CHUNK_BYTES, FileEntry
from echo2d.errors import IntegrityFault
from tests.support.encodings import BASE_DIGEST, facts

FILES = (FileEntry("config.json", 5, 0),)


def record(
    chunk: int, wire_bytes: int, mode: ChunkMode = ChunkMode.RAW, base: bytes = NO_BASE
) -> ChunkRecord:
    return ChunkRecord(ChunkId(chunk), mode, wire_bytes, base, digest_of(b"chunk %d" % chunk))


def frames(count: int) -> tuple[Digest, ...]:
    return tuple(digest_of(b"frame %d" % index) for index in range(count))


TABLE = SegmentTable(
    SegmentId(2),
    (record(7, 150_000), record(8, 0, ChunkMode.SAME, b"b" * 16), record(9, 65_536)),
    frames(4),
)


def test_a_form_id_depends_on_every_fact_except_the_frame_size() -> None:
    full = facts()
    others = [
        replace(full, run_id=RunId("other")),
        replace(full, epoch=Epoch(2)),
        replace(full, version=Version(8)),
        replace(full, publish_seq=PublishSeq(4)),
        facts("delta"),
        replace(facts("delta"), base_digest=digest_of(b"another base")),
    ]
    assert len({each.form for each in (full, *others)}) == 7
    assert len(full.form) == FORM_ID_CHARS
    assert replace(full, frame_bytes=FRAME_BYTES_MAX).form == full.form


@pytest.mark.parametrize(
    "change",
    [
        {"run_id": ""},
        {"run_id": "a/b"},
        {"run_id": "r" * 65},
        {"base_digest": BASE_DIGEST},
        {"kind": "delta"},
        {"kind": "delta", "base_digest": b"short"},
        {"frame_bytes": FRAME_BYTES_MIN - 1},
        {"frame_bytes": FRAME_BYTES_MAX + 1},
    ],
)
def test_impossible_facts_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(IntegrityFault):
        replace(facts(), **change)  # type: ignore[arg-type]


def test_facts_of_a_form_round_trip() -> None:
    for each in (facts(), facts("delta")):
        assert FormFacts.decode(each.encode()) == each


def test_small_forms_have_small_frames() -> None:
    assert frame_bytes_for(SMALL_FORM_BYTES - 1) == FRAME_BYTES_MIN
    assert frame_bytes_for(SMALL_FORM_BYTES) == FRAME_BYTES_DEFAULT


def test_records_round_trip_with_and_without_a_base() -> None:
    new = b"ab" * 500
    for base in (None, b"ba" * 500, new):
        made, payload = encode_record(ChunkId(3), new, base)
        assert made.result == digest_of(new)
        assert (made.base != NO_BASE) == (made.mode == ChunkMode.SAME)
        assert decode_record(made, payload, len(new), base) == new


def test_a_wrong_base_is_noticed() -> None:
    made, payload = encode_record(ChunkId(0), b"abcd", b"abcd")
    for base in (None, b"abce", b"abc"):
        with pytest.raises(LacksBase, match="base"):
            require_base(made, base)
    require_base(made, b"abcd")
    with pytest.raises(LacksBase, match="base"):
        decode_record(made, payload, 4)


def test_a_table_round_trips() -> None:
    first = SegmentTable(SegmentId(0), (record(0, 5),), frames(1), FILES)
    for table in (TABLE, first):
        assert SegmentTable.decode(table.encode()) == table
        assert table.digest == digest_of(table.encode())


def test_frames_do_not_cross_chunks() -> None:
    spans = frame_layout(TABLE, 65_536)
    assert [
        (span.frame, span.chunk, span.offset_in_chunk, span.length, span.offset_in_segment)
        for span in spans
    ] == [
        (frame_id(SegmentId(2), 1), 7, 0, 65_536, 0),
        (frame_id(SegmentId(2), 2), 7, 65_536, 65_536, 65_536),
        (frame_id(SegmentId(2), 3), 7, 131_072, 18_928, 131_072),
        (frame_id(SegmentId(2), 4), 9, 0, 65_536, 150_000),
    ]
    assert [span.digest for span in spans] == list(TABLE.frames)


@pytest.mark.parametrize("count", [3, 5])
def test_a_table_with_too_few_or_too_many_frames_is_refused(count: int) -> None:
    with pytest.raises(IntegrityFault, match="frames"):
        frame_layout(replace(TABLE, frames=frames(count)), 65_536)


@pytest.mark.parametrize(
    "change",
    [
        {"records": ()},
        {"segment": SegmentId(4096)},
        {"records": (record(60_000, 1),)},
        {"records": (record(7, CHUNK_BYTES + 1),)},
        {"records": (record(7, 0),)},
        {"records": (record(7, 1, ChunkMode.SAME),)},
        {"records": (record(7, 1, ChunkMode.FULL, b"b" * 16),)},
        {
            "records": tuple(
                record(chunk, CHUNK_BYTES) for chunk in range(SEGMENT_BYTES_MAX // CHUNK_BYTES + 1)
            )
        },
        {"files": FILES},
        {"segment": SegmentId(0)},
        {"segment": SegmentId(0), "files": (FileEntry("evil.py", 5, 0),)},
    ],
)
def test_impossible_tables_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(IntegrityFault):
        replace(TABLE, **change)  # type: ignore[arg-type]


def columns(**change: object) -> bytes:
    """An encoded table with some columns replaced."""
    names = [
        "format",
        "segment",
        "first_chunk",
        "modes",
        "wire_bytes",
        "bases",
        "results",
        "frames",
        "files",
    ]
    fields = dict(zip(names, msgpack.unpackb(TABLE.encode()), strict=True))
    packed: bytes = msgpack.packb(list((fields | change).values()))
    return packed


@pytest.mark.parametrize(
    "data",
    [
        b"",
        TABLE.encode()[:-1],
        TABLE.encode() + b"\0",
        bytes(TABLE_BYTES_MAX + 1),
        columns(format="echo2d-table-2"),
        columns(modes=b"\x01\x00"),
        columns(modes=b"\x01\x00\x06"),
        columns(wire_bytes=bytes(11)),
        columns(bases=bytes(47)),
        columns(results=bytes(64)),
        columns(results=bytes(95)),
        columns(frames=bytes(33)),
        columns(first_chunk=1 << 62),
        columns(files=[["config.json", 5]]),
    ],
)
def test_damaged_tables_are_refused(data: bytes) -> None:
    with pytest.raises(IntegrityFault):
        SegmentTable.decode(data)
