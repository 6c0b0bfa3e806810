"""Any bytes round-trip through the chunk codec; any other payload is refused or decodes to the right length."""

import contextlib

from hypothesis import given
from hypothesis import strategies as st

from echo2d.core.delta import Mode, decode_chunk, encode_chunk
from echo2d.errors import IntegrityFault

chunks = st.binary(max_size=600) | st.builds(bytes.__mul__, st.binary(max_size=5), st.integers(0, 400))


@given(new=chunks, base=st.none() | chunks)
def test_round_trip(new: bytes, base: bytes | None) -> None:
    encoded = encode_chunk(memoryview(new), base)
    assert len(encoded.payload) <= len(new)
    assert decode_chunk(encoded.mode, encoded.payload, len(new), base) == new


@given(new=chunks)
def test_an_equal_base_costs_nothing(new: bytes) -> None:
    encoded = encode_chunk(new, bytearray(new))
    assert (encoded.mode, encoded.payload) == (Mode.SAME, b"")


@given(new=chunks, raw_len=st.integers(0, 2000), mode=st.sampled_from(Mode), data=st.data())
def test_damaged_payloads(new: bytes, raw_len: int, mode: Mode, data: st.DataObject) -> None:
    payload = bytearray(encode_chunk(new).payload)
    for _ in range(data.draw(st.integers(0, 3))):
        if payload:
            payload[data.draw(st.integers(0, len(payload) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(IntegrityFault):
        assert len(decode_chunk(mode, payload, raw_len, new)) == raw_len


@given(payload=st.binary(max_size=200), raw_len=st.integers(0, 64))
def test_arbitrary_payloads(payload: bytes, raw_len: int) -> None:
    with contextlib.suppress(IntegrityFault):
        assert len(decode_chunk(Mode.FULL, payload, raw_len)) == raw_len
