"""Composes consecutive deltas into one: a -> b and b -> c become a -> c, without the bytes of a.

Differences add up modulo 2**16. So a chain of deltas that is decoded onto zeros gives the sum that
the chain adds to any base. If an encoding in the chain needs no base, decoding from this encoding
on gives the chunk's own bytes. The places of a split chunk depend on its base's bytes, so it cannot
be part of a chain; deltas are kept without such chunks (`delta.encode_twice`).

Not here: which deltas are kept, and which of them lead to a version (`kept_deltas`).
"""

from collections.abc import Callable, Sequence

from echo2d.core.base.canonical import Buffer, digest_of, require
from echo2d.core.base.ids import ChunkId
from echo2d.core.weights.delta import (
    FULL_SHARE_MIN,
    ChunkMode,
    EncodedChunk,
    decode_chunk,
    encode_chunk,
    encode_delta,
)
from echo2d.core.weights.form import NO_BASE, SELF_CONTAINED, ChunkRecord


def compose_chunks(chain: Sequence[EncodedChunk], raw_len: int) -> EncodedChunk | None:
    """Return one encoding with the effect of the whole chain; its base is that of the first encoding.

    None: the sum is a delta that is not smaller than the chunk. IntegrityFault: an encoding is
    wrong. Allocates at most about six times the chunk.
    """
    start = max(
        (place for place, each in enumerate(chain) if each.mode in SELF_CONTAINED), default=-1
    )
    deltas = [each for each in chain[start + 1 :] if each.mode != ChunkMode.SAME]
    if not deltas:
        return EncodedChunk(ChunkMode.SAME, b"") if start < 0 else chain[start]
    if start < 0 and len(deltas) == 1:
        return deltas[0]
    require(
        start >= 0 or all(each.mode != ChunkMode.SPLIT for each in deltas),
        "a split chunk cannot be composed without its base",
    )
    data: Buffer = (
        bytes(raw_len)
        if start < 0
        else decode_chunk(chain[start].mode, chain[start].payload, raw_len)
    )
    for each in deltas:
        data = decode_chunk(each.mode, each.payload, raw_len, data)
    return encode_chunk(data) if start >= 0 else _encode_sum(data)


def _encode_sum(words: Buffer) -> EncodedChunk | None:
    """Encode a sum of differences as a delta. An odd last byte is always sent, because the base's
    last byte is unknown.
    """
    zeros = bytearray(len(words))
    if len(words) % 2:
        zeros[-1] = words[-1] ^ 0xFF
    encoded = encode_delta(words, zeros)
    return encoded if encoded is not None and len(encoded.payload) < len(words) else None


def compose_record(
    chunk: ChunkId,
    chain: Sequence[tuple[ChunkRecord, Buffer]],
    raw_len: int,
    new: Callable[[], Buffer],
) -> tuple[ChunkRecord, bytes]:
    """Like `form.encode_record`, but from the chunk's records and payloads in kept deltas, oldest
    first.

    new: reads the chunk that the last delta makes. It is called only if the chunk encoded without a
    base may be smaller.
    """
    last = chain[-1][0]
    best = compose_chunks(
        [EncodedChunk(record.mode, bytes(payload)) for record, payload in chain], raw_len
    )
    if best is None or (
        best.mode not in SELF_CONTAINED and len(best.payload) > FULL_SHARE_MIN * raw_len
    ):
        data = new()
        require(digest_of(data) == last.result, f"chunk {chunk} is not what its deltas make")
        own = encode_chunk(data)
        best = own if best is None or len(own.payload) < len(best.payload) else best
    base = NO_BASE if best.mode in SELF_CONTAINED else chain[0][0].base
    return ChunkRecord(chunk, best.mode, len(best.payload), base, last.result), best.payload
