"""Composed deltas turn the first version into the last one, bit for bit, for any words and modes."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2d.core.weights.delta import (
    ChunkMode,
    EncodedChunk,
    decode_chunk,
    encode_chunk,
    encode_twice,
)
from echo2d.core.weights.delta_chain import compose_chunks
from echo2d.core.weights.delta_words import encode_dense, encode_sparse, find_changes

WORDS = 64


def changed(data: bytes, share: float, span: int, rng: np.random.Generator) -> bytes:
    """So many words moved by up to `span`, up or down, modulo 2**16; now and then the odd last byte."""
    words = np.frombuffer(data, "<u2", count=len(data) // 2).copy()
    moved = rng.random(words.size) < share
    words[moved] += rng.integers(-span, span + 1, int(moved.sum())).astype(np.uint16)
    last = data[len(data) // 2 * 2 :]
    return words.tobytes() + (bytes([last[0] ^ int(rng.integers(0, 2))]) if last else b"")


def encoded(new: bytes, base: bytes, mode: ChunkMode | None) -> EncodedChunk:
    """In this mode, if that is possible; otherwise as the encoder chooses what is kept."""
    if mode == ChunkMode.RAW:
        return EncodedChunk(ChunkMode.RAW, new)
    if mode == ChunkMode.FULL:
        return encode_chunk(new)
    if mode == ChunkMode.SPARSE and (changes := find_changes(new, base)) is not None:
        return EncodedChunk(ChunkMode.SPARSE, encode_sparse(new, changes))
    if mode == ChunkMode.DENSE and (dense := encode_dense(new, base)) is not None:
        return EncodedChunk(ChunkMode.DENSE, dense)
    return encode_twice(new, base)[1]


steps = st.lists(
    st.tuples(
        st.sampled_from([None, *ChunkMode]),
        st.sampled_from([0.0, 0.01, 0.3, 1.0]),
        st.sampled_from([1, 3, 400, 1 << 15]),
    ),
    min_size=1,
    max_size=5,
)


@settings(deadline=None, max_examples=300)
@given(steps, st.integers(0, 2**32), st.integers(0, 2), st.sampled_from([WORDS, 5000]))
def test_a_chain_of_deltas_equals_one_composed_delta(
    played: list[tuple[ChunkMode | None, float, int]], rng_seed: int, odd: int, words: int
) -> None:
    rng = np.random.default_rng(rng_seed)
    versions = [rng.bytes(2 * words + odd)]
    chain = []
    for mode, share, span in played:
        base = versions[-1]
        versions.append(changed(base, share, span, rng))
        chain.append(encoded(versions[-1], base, mode))
    raw_len = len(versions[0])
    one = compose_chunks(chain, raw_len)
    if one is None:
        assert all(
            each.mode in (ChunkMode.SAME, ChunkMode.SPARSE, ChunkMode.DENSE) for each in chain
        )
        direct = encode_chunk(versions[-1], versions[0])
        assert direct.mode in (ChunkMode.RAW, ChunkMode.FULL), (
            "the difference is too large, however it is made"
        )
        return
    base_needed = one.mode not in (ChunkMode.RAW, ChunkMode.FULL)
    assert base_needed == all(each.mode not in (ChunkMode.RAW, ChunkMode.FULL) for each in chain)
    assert (
        bytes(decode_chunk(one.mode, one.payload, raw_len, versions[0] if base_needed else None))
        == versions[-1]
    )
    assert len(one.payload) <= raw_len
    if base_needed and raw_len % 2 == 0 and len(chain) > 1:
        _, direct = encode_twice(versions[-1], versions[0])
        assert (
            one == direct
            or direct.mode in (ChunkMode.RAW, ChunkMode.FULL)
            or sum(each.mode != ChunkMode.SAME for each in chain) < 2
        )
