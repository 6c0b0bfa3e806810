"""Any bytes round-trip through the chunk codec; any other payload is refused or decodes to the right length."""

import contextlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from echo2d.core.weights.delta import ChunkMode, decode_chunk, encode_chunk
from echo2d.core.weights.delta_words import (
    decode_dense,
    decode_sparse,
    encode_dense,
    encode_sparse,
    find_changes,
)
from echo2d.errors import IntegrityFault

chunks = st.binary(max_size=600) | st.builds(
    bytes.__mul__, st.binary(max_size=5), st.integers(0, 400)
)
words = st.integers(0, 0xFFFF) | st.sampled_from(
    [0, 0x8000, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x7C01]
)  # NaNs of both


@st.composite
def pairs(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A chunk and its base, which is a little different, or very."""
    base = bytearray(draw(chunks))
    new = bytearray(base)
    places = st.integers(0, max(0, len(base) // 2 - 1))
    for place, word in draw(
        st.dictionaries(places, words, max_size=draw(st.sampled_from([2, 20, 300])))
    ).items():
        new[2 * place : 2 * place + 2] = word.to_bytes(2, "little")[: len(base) - 2 * place]
    step, by = draw(st.integers(1, 20)), draw(words)
    view = np.frombuffer(new, "<u2", count=len(new) // 2)[::step]
    view += np.uint16(by if draw(st.booleans()) else 0)
    return bytes(new), bytes(base)


@given(sides=pairs() | st.tuples(chunks, st.none() | chunks))
def test_any_chunk_round_trips(sides: tuple[bytes, bytes | None]) -> None:
    new, base = sides
    encoded = encode_chunk(memoryview(new), base)
    assert len(encoded.payload) <= len(new)
    assert decode_chunk(encoded.mode, encoded.payload, len(new), base) == new


@given(sides=pairs())
def test_any_change_round_trips_in_both_layouts(sides: tuple[bytes, bytes]) -> None:
    """Also where the other one is smaller."""
    new, base = sides
    changes = find_changes(new, base)
    if changes is not None:
        assert decode_sparse(encode_sparse(new, changes), base) == new
    dense = encode_dense(new, base)
    if dense is not None:
        assert decode_dense(dense, base) == new


@given(new=chunks)
def test_a_chunk_with_an_equal_base_takes_no_bytes(new: bytes) -> None:
    encoded = encode_chunk(new, bytearray(new))
    assert (encoded.mode, encoded.payload) == (ChunkMode.SAME, b"")


@given(sides=pairs(), raw_len=st.integers(0, 2000), mode=st.sampled_from(ChunkMode), data=st.data())
def test_damaged_payloads_are_refused_or_have_the_right_length(
    sides: tuple[bytes, bytes], raw_len: int, mode: ChunkMode, data: st.DataObject
) -> None:
    encoded = encode_chunk(*sides)
    payload = bytearray(encoded.payload)
    for _ in range(data.draw(st.integers(0, 3))):
        if payload:
            payload[data.draw(st.integers(0, len(payload) - 1))] ^= data.draw(st.integers(1, 255))
    for wrong, length in ((mode, raw_len), (encoded.mode, len(sides[0]))):
        with contextlib.suppress(IntegrityFault):
            assert len(decode_chunk(wrong, payload, length, sides[1])) == length


@given(payload=st.binary(max_size=200), raw_len=st.integers(0, 64), mode=st.sampled_from(ChunkMode))
def test_arbitrary_payloads_are_refused_or_have_the_right_length(
    payload: bytes, raw_len: int, mode: ChunkMode
) -> None:
    with contextlib.suppress(IntegrityFault):
        assert len(decode_chunk(mode, payload, raw_len, bytes(raw_len))) == raw_len
