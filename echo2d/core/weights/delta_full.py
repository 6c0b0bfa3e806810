"""Encodes a chunk without a base: compresses the exponents of its bf16 words, copies the rest.

    u32 h | zstd frame of the high plane, h bytes | low plane | odd last byte

The chunk is read as little-endian 16-bit words. Rotated left by one bit, the high byte of a bf16
word is its eight exponent bits, which compress well; the low byte is mantissa and sign, which do
not. Wrong payloads are an `IntegrityFault`.
"""

from collections.abc import Iterator

import numpy as np

from echo2d import native
from echo2d.core.base.canonical import Buffer, require
from echo2d.core.base.zstd import compress, decompress

_LENGTH_BYTES = 4
# Words are processed in blocks, so that intermediate arrays stay in the cache and reuse memory.
_BLOCK_WORDS = 1 << 16


def encode_full(new: Buffer) -> bytes:
    """Return the payload of a chunk."""
    count = len(new) // 2
    high, low = np.empty(count, np.uint8), np.empty(count, np.uint8)
    loops = native.loops()
    if loops is None:
        words = np.frombuffer(new, dtype="<u2", count=count)
        for block in _blocks(count):
            rotated = (words[block] << 1) | (words[block] >> 15)
            low[block] = rotated
            high[block] = rotated >> 8
    else:
        loops.part_planes(new, high.data, low.data)
    plane = compress(high.data)
    return b"".join(
        (len(plane).to_bytes(_LENGTH_BYTES, "little"), plane, low.data, new[2 * count :])
    )


def decode_full(payload: Buffer, raw_len: int) -> memoryview:
    """Return the chunk's `raw_len` bytes. Allocates at most about twice as much."""
    view, count = memoryview(payload), raw_len // 2
    low_start = _LENGTH_BYTES + int.from_bytes(view[:_LENGTH_BYTES], "little")
    require(low_start + raw_len - count == len(view), "a full chunk has planes of the wrong length")
    high = np.frombuffer(decompress(view[_LENGTH_BYTES:low_start], count), dtype=np.uint8)
    low = np.frombuffer(view, dtype=np.uint8, count=count, offset=low_start)
    new = np.empty(raw_len, np.uint8)
    loops = native.loops()
    if loops is None:
        words = new[: 2 * count].view("<u2")
        for block in _blocks(count):
            rotated = high[block].astype(np.uint16)
            rotated <<= 8
            rotated |= low[block]
            np.bitwise_or(rotated >> 1, rotated << 15, out=words[block])
    else:
        loops.join_planes(new.data, high.data, low.data)
    new[2 * count :] = np.frombuffer(view[low_start + count :], dtype=np.uint8)
    return new.data


def _blocks(length: int) -> Iterator[slice]:
    return (slice(start, start + _BLOCK_WORDS) for start in range(0, length, _BLOCK_WORDS))
