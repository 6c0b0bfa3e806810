"""Defines a form, which is a version in full or as a delta, cut for the wire: its facts, chunk records,
segment tables and frames.

    chunks (manifest) -> encoded chunks -> segments of at most 64 MiB, each with its table -> frames

    segment on the wire   | chunk 7 encoded      | chunk 8 | chunk 9 ...       offset_in_segment ->
    frames                | 1     | 2     | 3   | 4       | 5     | 6 ...
    frame 0               the segment's table: mode, length, base and result of each chunk, and the
                          digest of each frame

A frame never crosses a chunk boundary, so all frames of a chunk except the last are `frame_bytes`
long. The first segment's table also lists the files. A table is trusted because its digest is in a
signed root (`signed_index`). All decoding here raises `IntegrityFault` on wrong bytes. Not here:
how chunks are encoded (`delta`), how forms are built (`encoder`) and verified (`verifier`).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from xxhash import xxh3_128_digest

from echo2d.core.base.canonical import Buffer, canonical_unpacker, digest_of
from echo2d.core.base.codec import pack
from echo2d.core.base.ids import (
    DIGEST_BYTES,
    FORM_ID_CHARS,
    FRAME_INDEX_MAX,
    SEGMENTS_MAX,
    ChunkId,
    Digest,
    Epoch,
    FormId,
    FrameId,
    PublishSeq,
    RunId,
    SegmentId,
    Version,
    frame_id,
)
from echo2d.core.weights.delta import ChunkMode, decode_chunk, encode_twice
from echo2d.core.weights.kept_deltas import FormKind
from echo2d.core.weights.manifest import (
    CHUNK_BYTES,
    CHUNKS_MAX,
    FileEntry,
    check_files,
    split_digests,
)
from echo2d.errors import IntegrityFault

# A segment is signed as a whole; this is about a second of a 500 Mbit/s uplink.
SEGMENT_BYTES_MAX = 64 << 20
SEGMENT_BYTES_MIN = 1 << 20  # no frame leaves before its segment is closed and signed
# A segment closes at this share of the bytes before it. So frames leave soon after the encoder has
# begun, the last segment is at most a fifth of a form, and a delta of 100 MB has about 19 segments.
SEGMENT_GROWTH = 0.25
TABLE_BYTES_MAX = 1 << 20  # a table travels as one frame
FRAME_BYTES_MIN = 64 << 10  # with smaller frames, headers and digests cost too much
FRAME_BYTES_DEFAULT = 256 << 10
FRAME_BYTES_MAX = 1 << 20  # with larger frames, a relay waits too long before it can forward
# A smaller form needs small frames: with few frames, the last ones of each relay delay all other peers.
SMALL_FORM_BYTES = 1 << 30
RUN_ID_CHARS_MAX = 64
BASE_BYTES = 16  # xxh3-128
NO_BASE = bytes(BASE_BYTES)
RECORD_TABLE_BYTES = 1 + 4 + BASE_BYTES + DIGEST_BYTES  # for each chunk in an encoded table

SELF_CONTAINED = (ChunkMode.RAW, ChunkMode.FULL)  # modes that need no base


def frame_bytes_for(expected_wire_bytes: int) -> int:
    """The frame size for a form with about this many bytes on the wire."""
    return FRAME_BYTES_MIN if expected_wire_bytes < SMALL_FORM_BYTES else FRAME_BYTES_DEFAULT


def form_id(
    run_id: RunId,
    epoch: Epoch,
    version: Version,
    publish_seq: PublishSeq,
    kind: FormKind,
    base_digest: Digest | None,
) -> FormId:
    facts = ("echo2d-form-1", run_id, epoch, version, publish_seq, kind, base_digest)
    return FormId(digest_of(pack(facts)).hex()[:FORM_ID_CHARS])


@dataclass(frozen=True, slots=True)
class FormFacts:
    """The facts of a form that are fixed before its first segment is encoded."""

    run_id: RunId
    epoch: Epoch
    version: Version
    publish_seq: PublishSeq
    kind: FormKind
    # The digest of the snapshot that the form is a delta from; None for full forms.
    base_digest: Digest | None
    frame_bytes: int

    def __post_init__(self) -> None:
        if len(self.run_id) > RUN_ID_CHARS_MAX or not re.fullmatch(r"[A-Za-z0-9._-]+", self.run_id):
            expected = f"1 to {RUN_ID_CHARS_MAX} of A-Z a-z 0-9 . _ -"
            raise IntegrityFault(
                f"run_id: expected {expected}; found {self.run_id[:RUN_ID_CHARS_MAX]!r}"
            )
        if (self.kind == "full") != (self.base_digest is None):
            raise IntegrityFault("a delta form must have a base, and a full form must have none")
        if self.base_digest is not None and len(self.base_digest) != DIGEST_BYTES:
            raise IntegrityFault(f"a form's base digest is not {DIGEST_BYTES} bytes long")
        if not FRAME_BYTES_MIN <= self.frame_bytes <= FRAME_BYTES_MAX:
            expected = f"{FRAME_BYTES_MIN} to {FRAME_BYTES_MAX}"
            raise IntegrityFault(f"frame_bytes: expected {expected}; found {self.frame_bytes}")

    @property
    def form(self) -> FormId:
        return form_id(
            self.run_id, self.epoch, self.version, self.publish_seq, self.kind, self.base_digest
        )

    def encode(self) -> bytes:
        return pack(self)

    @staticmethod
    def decode(data: bytes) -> "FormFacts":
        return _unpack_facts(data)


_unpack_facts = canonical_unpacker(FormFacts, bytes_max=1024)


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """One encoded chunk."""

    chunk: ChunkId
    mode: ChunkMode
    wire_bytes: int
    base: bytes  # xxh3-128 of the base chunk that it needs, or NO_BASE
    result: Digest  # blake3-256 of the chunk

    @property
    def needs_base(self) -> bool:
        return self.mode not in SELF_CONTAINED


def base_sum(data: Buffer) -> bytes:
    """The xxh3-128 of a base chunk, as in ChunkRecord.base. This sum detects disk errors; ChunkRecord.result
    detects attacks.
    """
    return xxh3_128_digest(data)


class LacksBase(IntegrityFault):
    """A chunk is a delta from bytes that this peer does not have."""


def encode_record(
    chunk: ChunkId, new: Buffer, base: Buffer | None = None
) -> tuple[ChunkRecord, bytes]:
    """Encode one chunk into its record and payload. Many threads may call this."""
    return encode_records(chunk, new, base)[0]


def encode_records(
    chunk: ChunkId, new: Buffer, base: Buffer | None = None
) -> tuple[tuple[ChunkRecord, bytes], tuple[ChunkRecord, bytes]]:
    """Encode one chunk into the record and payload to send, and the record and payload to keep for composing
    deltas (`delta_chain`). The two pairs are the same unless the one to send is split.
    """
    sent, kept = encode_twice(new, base)
    result = digest_of(new)
    needs_base = base is not None and sent.mode not in SELF_CONTAINED
    needed = base_sum(base) if base is not None and needs_base else NO_BASE
    records = [
        (ChunkRecord(chunk, each.mode, len(each.payload), of, result), each.payload)
        for each, of in (
            (sent, needed),
            (kept, NO_BASE if kept.mode in SELF_CONTAINED else needed),
        )
    ]
    return records[0], records[0] if kept is sent else records[1]


def decode_record(
    record: ChunkRecord,
    payload: Buffer,
    raw_len: int,
    base: Buffer | None = None,
    *,
    overwrite: bool = False,
) -> Buffer:
    """Return the chunk's bytes. LacksBase: there is no base. overwrite: as in `decode_chunk`.

    The result digest is *not* checked here: `SlotWriter.write_chunk` does that. The base is not
    checked either, because a wrong one gives a wrong result or a fault: then call `require_base`.
    """
    if record.needs_base and base is None:
        raise LacksBase(f"chunk {record.chunk} needs a base that this peer does not have")
    return decode_chunk(record.mode, payload, raw_len, base, overwrite=overwrite)


def require_base(record: ChunkRecord, base: Buffer | None) -> None:
    """Raise LacksBase if the chunk is a delta from another base.

    Call it when a chunk was decoded to a wrong result. A base that was overwritten must be read again.
    """
    if record.needs_base and (base is None or base_sum(base) != record.base):
        raise LacksBase(f"chunk {record.chunk} needs a base that this peer does not have")


@dataclass(frozen=True, slots=True)
class FrameSpan:
    """The place of a payload frame of `length` bytes: its offsets in the encoded chunk and the segment."""

    frame: FrameId
    chunk: ChunkId
    offset_in_chunk: int
    length: int
    offset_in_segment: int
    digest: Digest

    def is_made_of(self, payload: Buffer) -> bool:
        """Whether the length and digest of these bytes are those of the frame."""
        return len(payload) == self.length and digest_of(payload) == self.digest


@dataclass(frozen=True, slots=True)
class _TableRecord:
    """The fields of a table's canonical encoding: each bytes field is a column over chunks or frames."""

    format: Literal["echo2d-table-1"]
    segment: SegmentId
    first_chunk: ChunkId
    modes: bytes
    wire_bytes: bytes
    bases: bytes
    results: bytes
    frames: bytes
    files: tuple[FileEntry, ...]


_unpack_table = canonical_unpacker(_TableRecord, bytes_max=TABLE_BYTES_MAX)


@dataclass(frozen=True, slots=True)
class SegmentTable:
    """The contents of a segment: the records of consecutive chunks, the digests of frames 1, 2, ..., and
    in segment 0 the files.

    A table is checked when it is made, so every table is valid in itself.
    """

    segment: SegmentId
    records: tuple[ChunkRecord, ...]
    frames: tuple[Digest, ...]
    files: tuple[FileEntry, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.segment < SEGMENTS_MAX or not self.records or self.end_chunk > CHUNKS_MAX:
            raise IntegrityFault("a segment table has an impossible number or no chunks")
        for record in self.records:
            _check_record(record)
        if self.wire_bytes > SEGMENT_BYTES_MAX or len(self.frames) > FRAME_INDEX_MAX:
            raise IntegrityFault(f"a segment of {self.wire_bytes} bytes is too large")
        if (self.segment == 0) != bool(self.files):
            raise IntegrityFault("segment 0 must list the files, and other segments must not")
        if self.files:
            check_files(self.files)

    @property
    def first_chunk(self) -> ChunkId:
        return self.records[0].chunk

    @property
    def end_chunk(self) -> int:
        """One past the last chunk."""
        return self.records[-1].chunk + 1

    @property
    def wire_bytes(self) -> int:
        """The bytes of all frames, without this table."""
        return sum(record.wire_bytes for record in self.records)

    @property
    def digest(self) -> Digest:
        return digest_of(self.encode())

    def encode(self) -> bytes:
        return pack(
            _TableRecord(
                "echo2d-table-1",
                self.segment,
                self.first_chunk,
                bytes(record.mode for record in self.records),
                np.array([record.wire_bytes for record in self.records], dtype="<u4").tobytes(),
                b"".join(record.base for record in self.records),
                b"".join(record.result for record in self.records),
                b"".join(self.frames),
                self.files,
            )
        )

    @staticmethod
    def decode(data: bytes) -> "SegmentTable":
        fields = _unpack_table(data)
        return SegmentTable(
            fields.segment, tuple(_records(fields)), split_digests(fields.frames), fields.files
        )


def _records(fields: _TableRecord) -> Iterator[ChunkRecord]:
    count, results = len(fields.modes), split_digests(fields.results)
    if (len(fields.wire_bytes), len(fields.bases), len(results)) != (
        4 * count,
        BASE_BYTES * count,
        count,
    ):
        raise IntegrityFault("a segment table has columns of different lengths")
    if not set(fields.modes) <= set(ChunkMode):
        raise IntegrityFault("a segment table names an unknown chunk mode")
    lengths = np.frombuffer(fields.wire_bytes, dtype="<u4").tolist()
    for row in range(count):
        base = fields.bases[BASE_BYTES * row : BASE_BYTES * (row + 1)]
        chunk = ChunkId(fields.first_chunk + row)
        yield ChunkRecord(chunk, ChunkMode(fields.modes[row]), lengths[row], base, results[row])


def _check_record(record: ChunkRecord) -> None:
    if record.wire_bytes > CHUNK_BYTES or (record.mode == ChunkMode.SAME) != (
        record.wire_bytes == 0
    ):
        raise IntegrityFault(f"chunk {record.chunk} cannot take {record.wire_bytes} wire bytes")
    if record.mode in SELF_CONTAINED and record.base != NO_BASE:
        raise IntegrityFault(f"chunk {record.chunk} names a base that it does not need")


def frame_layout(table: SegmentTable, frame_bytes: int) -> tuple[FrameSpan, ...]:
    """Return all payload frames of a segment; frame i is at position i - 1.

    IntegrityFault: the table does not list as many frames as its chunks need.
    """
    places = list(_frame_places(table, frame_bytes))
    if len(places) != len(table.frames):
        raise IntegrityFault(
            f"segment {table.segment} lists {len(table.frames)} frames for {len(places)}"
        )
    return tuple(
        FrameSpan(frame_id(table.segment, index), chunk, offset, length, position, digest)
        for index, ((chunk, offset, length, position), digest) in enumerate(
            zip(places, table.frames, strict=True), 1
        )
    )


def _frame_places(table: SegmentTable, frame_bytes: int) -> Iterator[tuple[ChunkId, int, int, int]]:
    """Yield (chunk, offset in chunk, length, offset in segment) of each frame."""
    start = 0
    for record in table.records:
        for offset in range(0, record.wire_bytes, frame_bytes):
            yield record.chunk, offset, min(frame_bytes, record.wire_bytes - offset), start + offset
        start += record.wire_bytes
