"""Encodes and decodes one chunk exactly: `decode_chunk(encode_chunk(new, base), base) == new`, bit for
bit.

    mode     payload                                    used if
    same     nothing: the chunk equals its base         no word changed
    split    as sparse, by the magnitude of the base    it is smaller than sparse (`delta_split`)
    sparse   which words changed and by how much        up to 15 % of them changed (`delta_words`)
    dense    by how much each word changed              more of them changed (`delta_words`)
    full     exponents compressed, the rest unchanged   smaller, or there is no base (`delta_full`)
    raw      the bytes                                  no other mode is smaller

Any bytes of any length round-trip; a base of another length is not used. Chunks are independent,
and most of the work releases the GIL, so threads help. Payloads carry no mode or lengths: these are
in the segment table. `decode_chunk` raises `IntegrityFault` on wrong input.

Mode split is tried only with the compiled loops (`echo2d.native`): in numpy it would take ten times
as long as the rest of encoding. A split chunk cannot be composed with others (`delta_chain`), so
`encode_twice` also returns an encoding that can.
"""

from dataclasses import dataclass
from enum import IntEnum

from echo2d import native
from echo2d.core.base.canonical import Buffer, require
from echo2d.core.weights.delta_full import decode_full, encode_full
from echo2d.core.weights.delta_split import decode_split
from echo2d.core.weights.delta_words import (
    decode_dense,
    decode_sparse,
    encode_dense,
    encode_found,
    encode_sparse,
    find_changes,
    sparse_max,
)
from echo2d.errors import IntegrityFault

# Mode full takes at least this share of the chunk's bytes, because one of its two planes is not
# compressed.
FULL_SHARE_MIN = 0.5


class ChunkMode(IntEnum):
    """How a chunk is encoded; the numbers are the wire format."""

    SAME = 0
    RAW = 1
    FULL = 2
    SPARSE = 3
    DENSE = 4
    SPLIT = 5


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """A payload and the mode to decode it with."""

    mode: ChunkMode
    payload: bytes


def encode_chunk(new: Buffer, base: Buffer | None = None) -> EncodedChunk:
    """Return the smallest encoding of `new`. base: the same chunk of the base version; None: no base.

    Allocates at most about four times the chunk.
    """
    return encode_twice(new, base)[0]


def encode_twice(new: Buffer, base: Buffer | None = None) -> tuple[EncodedChunk, EncodedChunk]:
    """Return the smallest encoding, and the smallest one that can be composed with others. The two are the
    same unless the first is split.
    """
    delta, split = (
        (None, b"") if base is None or len(base) != len(new) else _deltas(new, base, split=True)
    )
    composable = _smallest(new, delta)
    if split and len(split) < len(composable.payload):
        return EncodedChunk(ChunkMode.SPLIT, split), composable
    return composable, composable


def _smallest(new: Buffer, delta: EncodedChunk | None) -> EncodedChunk:
    """Return the delta, or the chunk encoded without a base if that is smaller."""
    # A delta this small is smaller than mode full can be, which is then not tried.
    if delta is not None and len(delta.payload) <= FULL_SHARE_MIN * len(new):
        return delta
    full = EncodedChunk(ChunkMode.FULL, encode_full(new))
    best = full if delta is None or len(full.payload) < len(delta.payload) else delta
    return best if len(best.payload) < len(new) else EncodedChunk(ChunkMode.RAW, bytes(new))


def encode_delta(new: Buffer, base: Buffer) -> EncodedChunk | None:
    """Encode `new` as same, sparse or dense, which can be composed; `base` has the same length.
    None: that would not be smaller.
    """
    return _deltas(new, base, split=False)[0]


def _deltas(new: Buffer, base: Buffer, *, split: bool) -> tuple[EncodedChunk | None, bytes]:
    """Return the result of `encode_delta`, and the payload of mode split if that is wanted and tried."""
    loops = native.loops()
    if loops is None:
        changes = find_changes(new, base)
        count = None if changes is None else changes.places.size
        payload = b"" if changes is None else encode_sparse(new, changes)
        other = b""
    else:
        found = loops.encode_sparse(new, base, sparse_max(len(new) // 2), split=split)
        count = None if found is None else len(found[0][0])
        payload = b"" if found is None else encode_found(new, found[0])
        other = b"" if found is None else found[1]
    if count is None:
        dense = encode_dense(new, base)
        return None if dense is None else EncodedChunk(ChunkMode.DENSE, dense), b""
    last = bytes(new[len(new) // 2 * 2 :])
    if not count and last == base[len(new) // 2 * 2 :]:
        return EncodedChunk(ChunkMode.SAME, b""), b""
    return EncodedChunk(ChunkMode.SPARSE, payload), other + last if other else b""


def decode_chunk(
    mode: ChunkMode,
    payload: Buffer,
    raw_len: int,
    base: Buffer | None = None,
    *,
    overwrite: bool = False,
) -> Buffer:
    """Return the chunk's `raw_len` bytes, which may be `payload` or `base` itself.

    overwrite: decode a delta in the memory of the base, which must be writable and is undefined after
    a fault. Allocates at most about four times raw_len, whatever the payload claims.
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
        case ChunkMode.SPLIT:
            return decode_split(payload, _matching(base, raw_len), overwrite=overwrite)


def _matching(base: Buffer | None, raw_len: int) -> Buffer:
    if base is None or len(base) != raw_len:
        raise IntegrityFault(f"a delta chunk of {raw_len} bytes has no base of that length")
    return base
