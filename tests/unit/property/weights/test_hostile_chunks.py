"""Valid encoded chunks that were cut, flipped, swapped, replayed on another base, or given lying lengths.

A chunk is judged as at a receiver: `decode_record`, then its length and result digest, as `SlotWriter.write_chunk` does
before a byte of it is written. Each is decoded with one of the codecs that are available here.
"""

import random
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import zstandard

from echo2d import native
from echo2d.core.base.canonical import Buffer, digest_of, require
from echo2d.core.base.ids import ChunkId
from echo2d.core.weights.delta import ChunkMode
from echo2d.core.weights.delta_words import find_changes
from echo2d.core.weights.form import (
    NO_BASE,
    ChunkRecord,
    base_sum,
    decode_record,
    encode_record,
)
from echo2d.errors import IntegrityFault
from tests.support.fuzz import Fuzz, damaged
from tests.support.numpy_split import encode_split

WORDS = 700
SCRATCH_MAX = 4  # times the chunk's length ...
SCRATCH_LEAST = 24 << 10  # ... and what Python and numpy take for themselves, however short it is
BOMBS = tuple(zstandard.ZstdCompressor().compress(bytes(size)) for size in (1 << 16, 32 << 20))


@dataclass(frozen=True, slots=True)
class Sent:
    """One chunk as it travels, and what it is made of."""

    record: ChunkRecord
    payload: bytes
    base: bytes
    new: bytes


@pytest.fixture(scope="module")
def sent() -> list[Sent]:
    """Of each mode, of even and odd lengths."""
    return list(_sent(np.random.default_rng(7)))


def _sent(rng: np.random.Generator) -> Iterator[Sent]:
    for number, share in enumerate((0.0, 0.003, 0.02, 0.1, 0.14, 0.2, 0.6, 1.0, 0.0, 0.02, 0.5)):
        values = (rng.standard_normal(WORDS, np.float32) * np.float32(0.02)).view(np.uint32) >> 16
        base = values.astype("<u2")
        new = base.copy()
        places = np.flatnonzero(rng.random(WORDS) < share)
        new[places] += rng.choice(
            np.array([1, -1, 1, -1, 1, -1, 3, -40, 20_000]), places.size
        ).astype(np.uint16)
        sides = (
            (new.tobytes(), base.tobytes())
            if number < 8
            else (new.tobytes() + b"a", base.tobytes() + b"b")
        )
        yield Sent(*encode_record(ChunkId(number), *sides), base=sides[1], new=sides[0])
        changes = find_changes(*sides)
        if changes is not None and changes.places.size:
            # The encoder would choose it for larger chunks than these only.
            payload = encode_split(*sides, changes)
            record = ChunkRecord(
                ChunkId(number),
                ChunkMode.SPLIT,
                len(payload),
                base_sum(sides[1]),
                digest_of(sides[0]),
            )
            yield Sent(record, payload, base=sides[1], new=sides[0])
        if share in (0.02, 1.0):
            yield Sent(*encode_record(ChunkId(number), sides[0]), base=sides[1], new=sides[0])
    noise = rng.bytes(2 * WORDS)
    yield Sent(*encode_record(ChunkId(99), noise), base=bytes(len(noise)), new=noise)


def received(record: ChunkRecord, payload: Buffer, raw_len: int, base: bytes | None) -> Buffer:
    data = decode_record(record, payload, raw_len, base)
    assert len(data) == raw_len
    require(digest_of(data) == record.result, "not what was promised")
    return data


def test_the_sent_chunks_use_all_modes(sent: list[Sent]) -> None:
    assert {each.record.mode for each in sent} == set(ChunkMode)
    for each in sent:
        assert received(each.record, each.payload, len(each.new), each.base) == each.new


def test_a_damaged_chunk_is_a_fault_or_gives_the_right_bytes(fuzz: Fuzz, sent: list[Sent]) -> None:
    """Never other bytes than were promised, never another exception, never more memory than a few chunks take."""
    rng, refused = fuzz.rng, 0
    tracemalloc.start()
    for _ in fuzz.share(1.0):
        right = rng.choice(sent)
        record, payload, raw_len, base = spoiled(rng, right, sent)
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        try:
            with native.using(rng.choice(native.available())):
                assert received(record, payload, raw_len, base) == right.new
        except IntegrityFault:
            refused += 1
        assert (
            tracemalloc.get_traced_memory()[1] - before
            < SCRATCH_MAX * max(raw_len, 2 * WORDS) + SCRATCH_LEAST
        )
    tracemalloc.stop()
    assert 0.8 * len(fuzz.share(1.0)) < refused < len(fuzz.share(1.0))


def spoiled(
    rng: random.Random, right: Sent, sent: list[Sent]
) -> tuple[ChunkRecord, bytes, int, bytes | None]:
    """Record, payload, length and base, one or more of them wrong; the promised result stays."""
    record, payload, raw_len, base = right.record, right.payload, len(right.new), right.base
    other = rng.choice(sent)
    match rng.randrange(8):
        case 0:  # swapped
            return record, other.payload, raw_len, base
        case 1:  # replayed as the chunk it was, for this one's place
            return replace(other.record, result=record.result), other.payload, raw_len, base
        case 2:
            return (
                replace(record, mode=rng.choice(list(ChunkMode))),
                damaged(rng, payload),
                raw_len,
                base,
            )
        case 3:
            return (
                record,
                payload,
                rng.choice((0, 1, raw_len - 1, raw_len + 1, 2 * raw_len, 64 << 10)),
                base,
            )
        case 4:
            bases = (None, damaged(rng, base), other.base, right.new, b"")
            return (
                replace(record, base=rng.choice((record.base, NO_BASE))),
                payload,
                raw_len,
                rng.choice(bases),
            )
        case 5:
            return record, bombed(rng, record.mode, payload), raw_len, base
        case _:
            return record, damaged(rng, payload, [each.payload for each in sent]), raw_len, base


def bombed(rng: random.Random, mode: ChunkMode, payload: bytes) -> bytes:
    """One of its columns is a bomb; lengths are as they should be."""
    columns = {ChunkMode.FULL: 1, ChunkMode.SPARSE: 4, ChunkMode.DENSE: 3}.get(mode, 1)
    lengths = [
        int.from_bytes(payload[4 * each : 4 * each + 4], "little") for each in range(columns)
    ]
    at, start, frames = rng.randrange(columns), 4 * columns, []
    for length in lengths:
        frames.append(payload[start : start + length])
        start += length
    frames[at] = rng.choice(BOMBS)
    return b"".join(
        [*(len(frame).to_bytes(4, "little") for frame in frames), *frames, payload[start:]]
    )
