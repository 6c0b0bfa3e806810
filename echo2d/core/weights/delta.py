"""Encode and decode one chunk exactly: `decode_chunk(encode_chunk(new, base), base) == new`, bit
for bit.

    mode     payload                                    used if
    same     nothing: the chunk equals its base         no word changed
    sparse   which words changed and by how much        up to 15 % of them changed (`delta_words`)
    dense    by how much each word changed              more of them changed (`delta_words`)
    full     exponents compressed, the rest unchanged   smaller, or there is no base (`delta_full`)
    raw      the bytes                                  no other mode is smaller

Any bytes of any length round-trip; a base of another length is not used. Chunks are independent,
and most of the work releases the GIL, so threads help. Payloads carry no mode or lengths: these are
in the segment table. `decode_chunk` raises `IntegrityFault` on wrong input.
"""

from dataclasses import dataclass
from enum import IntEnum

from echo2d.core.base.canonical import Buffer, require
from echo2d.core.weights.delta_full import decode_full, encode_full
from echo2d.core.weights.delta_words import (
    decode_dense,
    decode_sparse,
    encode_dense,
    encode_sparse,
    find_changes,
)
from echo2d.errors import IntegrityFault

# The least that mode full takes, as a share of the chunk's bytes: one of its two planes is not
# compressed.
FULL_SHARE_MIN = 0.5


class ChunkMode(IntEnum):
    """How a chunk is encoded; the numbers are the wire format."""

    SAME = 0
    RAW = 1
    FULL = 2
    SPARSE = 3
    DENSE = 4


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """A payload and the mode to decode it with."""

    mode: ChunkMode
    payload: bytes


def encode_chunk(new: Buffer, base: Buffer | None = None) -> EncodedChunk:
    """Return the smallest encoding of `new`. base: the same chunk of the base version, if there is
    one.

    Allocates at most about four times the chunk.
    """
    delta = None if base is None or len(base) != len(new) else encode_delta(new, base)
    # Then mode full cannot be smaller, and is not tried.
    if delta is not None and len(delta.payload) <= FULL_SHARE_MIN * len(new):
        return delta
    full = EncodedChunk(ChunkMode.FULL, encode_full(new))
    best = full if delta is None or len(full.payload) < len(delta.payload) else delta
    return best if len(best.payload) < len(new) else EncodedChunk(ChunkMode.RAW, bytes(new))


def encode_delta(new: Buffer, base: Buffer) -> EncodedChunk | None:
    """Encode `new` as same, sparse or dense; `base` has the same length. None: that would not be
    smaller.
    """
    changes = find_changes(new, base)
    if changes is None:
        dense = encode_dense(new, base)
        return None if dense is None else EncodedChunk(ChunkMode.DENSE, dense)
    if not changes.places.size and new[-1:] == base[-1:]:
        return EncodedChunk(ChunkMode.SAME, b"")
    return EncodedChunk(ChunkMode.SPARSE, encode_sparse(new, changes))


def decode_chunk(
    mode: ChunkMode,
    payload: Buffer,
    raw_len: int,
    base: Buffer | None = None,
    *,
    overwrite: bool = False,
) -> Buffer:
    """Return the chunk's `raw_len` bytes, which may be `payload` or `base` itself.

    overwrite: decode a delta in the memory of the base, which must be writable and is undefined
    after a fault. Allocates at most about four times raw_len, whatever the payload claims.
    """
    match mode:
        case ChunkMode.SAME:
            require(len(payload) == 0, "a same chunk has a payload")
            return _matching(base, raw_len)
        case ChunkMode.RAW:
            require(len(payload) == raw_len, "a raw chunk has the wrong length")
            return payload
        case ChunkMode.FULL:
            return decode_full(payload, raw_len)
        case ChunkMode.SPARSE:
            return decode_sparse(payload, _matching(base, raw_len), overwrite=overwrite)
        case ChunkMode.DENSE:
            return decode_dense(payload, _matching(base, raw_len), overwrite=overwrite)


def _matching(base: Buffer | None, raw_len: int) -> Buffer:
    if base is None or len(base) != raw_len:
        raise IntegrityFault("a delta chunk has no base of its length")
    return base
