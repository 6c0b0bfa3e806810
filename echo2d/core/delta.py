"""One chunk, encoded and decoded exactly: `decode_chunk(encode_chunk(new, base), base) == new`, bit for bit.

    mode    payload
    same    nothing: the chunk is its base
    raw     the bytes
    full    u32 h | zstd frame of the high plane, h bytes | low plane | odd last byte
    sparse, dense   reserved numbers

full: the chunk is read as little-endian 16-bit words w; rotated left by one bit, a bf16 word's high byte is its eight
exponent bits, which compress, and its low byte is mantissa and sign, which do not. Any bytes of any length round-trip.
Only payloads travel; mode and lengths stand in the segment table. Wrong input to `decode_chunk` is `IntegrityFault`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import zstandard

from echo2d.core.canonical import Buffer, require
from echo2d.errors import IntegrityFault

ZSTD_LEVEL = 1  # higher levels buy at most 2 % for a multiple of the time

_LENGTH_BYTES = 4
_BLOCK = 1 << 16  # 16-bit words: 128 KiB


class Mode(IntEnum):
    """How a chunk is encoded; the numbers are the wire format."""

    SAME = 0
    RAW = 1
    FULL = 2
    SPARSE = 3
    DENSE = 4


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """A payload and how to read it."""

    mode: Mode
    payload: bytes


def encode_chunk(new: Buffer, base: Buffer | None = None) -> EncodedChunk:
    """The smallest encoding of `new`; `base` is the same chunk of the base version, if there is one."""
    if base is not None and _equal(new, base):
        return EncodedChunk(Mode.SAME, b"")
    full = _encode_full(new)
    if len(full) < len(new):
        return EncodedChunk(Mode.FULL, full)
    return EncodedChunk(Mode.RAW, bytes(new))


def _equal(left: Buffer, right: Buffer) -> bool:
    if len(left) != len(right):
        return False
    mine, theirs = np.frombuffer(left, dtype=np.uint8), np.frombuffer(right, dtype=np.uint8)
    return all(np.array_equal(mine[block], theirs[block]) for block in _blocks(len(left)))


def _blocks(length: int) -> Iterator[slice]:
    """Ranges to work on one after the other, so that intermediate values stay in cache and cost no fresh memory."""
    return (slice(start, start + _BLOCK) for start in range(0, length, _BLOCK))


def decode_chunk(mode: Mode, payload: Buffer, raw_len: int, base: Buffer | None = None) -> Buffer:
    """The chunk's `raw_len` bytes; may be `payload` or `base` itself.

    Allocates no more than a small multiple of raw_len, whatever the payload says.
    """
    match mode:
        case Mode.SAME:
            return _decode_same(payload, raw_len, base)
        case Mode.RAW:
            require(len(payload) == raw_len, "a raw chunk has the wrong length")
            return payload
        case Mode.FULL:
            return _decode_full(memoryview(payload), raw_len)
        case Mode.SPARSE | Mode.DENSE:
            raise IntegrityFault(f"chunk mode {mode.name} is not supported")


def _decode_same(payload: Buffer, raw_len: int, base: Buffer | None) -> Buffer:
    require(len(payload) == 0, "a same chunk has a payload")
    if base is None or len(base) != raw_len:
        raise IntegrityFault("a same chunk has no base of its length")
    return base


def _encode_full(new: Buffer) -> bytes:
    count = len(new) // 2
    words = np.frombuffer(new, dtype="<u2", count=count)
    high, low = np.empty(count, np.uint8), np.empty(count, np.uint8)
    for block in _blocks(count):
        rotated = (words[block] << 1) | (words[block] >> 15)
        low[block] = rotated
        high[block] = rotated >> 8
    compressed = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(high.data)
    return b"".join((len(compressed).to_bytes(_LENGTH_BYTES, "little"), compressed, low.data, new[2 * count :]))


def _decode_full(payload: memoryview, raw_len: int) -> memoryview:
    count = raw_len // 2
    low_start = _LENGTH_BYTES + int.from_bytes(payload[:_LENGTH_BYTES], "little")
    require(low_start + raw_len - count == len(payload), "a full chunk has planes of the wrong length")
    high = np.frombuffer(_decompress(payload[_LENGTH_BYTES:low_start], count), dtype=np.uint8)
    low = np.frombuffer(payload, dtype=np.uint8, count=count, offset=low_start)
    new = np.empty(raw_len, np.uint8)
    words = new[: 2 * count].view("<u2")
    for block in _blocks(count):
        rotated = high[block].astype(np.uint16)
        rotated <<= 8
        rotated |= low[block]
        np.bitwise_or(rotated >> 1, rotated << 15, out=words[block])
    new[2 * count :] = np.frombuffer(payload[low_start + count :], dtype=np.uint8)
    return new.data


def _decompress(frame: memoryview, length: int) -> bytes:
    """The frame's content, which must be `length` bytes.

    The declared size is checked first, because the decompressor would trust it and allocate that much.
    """
    try:
        declared = zstandard.frame_content_size(frame)
        require(declared == length, "a compressed plane declares the wrong length")
        plane: bytes = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise IntegrityFault("a compressed plane does not decompress") from error
    require(len(plane) == length, "a compressed plane has the wrong length")
    return plane
