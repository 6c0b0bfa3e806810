"""The chunk codec: which mode is chosen, its exact bytes, and what is refused."""

import numpy as np
import pytest
import zstandard

from echo2d.core.delta import Mode, decode_chunk, encode_chunk
from echo2d.errors import IntegrityFault

RNG = np.random.default_rng(7)
WORDS = (RNG.standard_normal(1 << 14).astype(np.float32).view(np.uint32) >> 16).astype("<u2").tobytes()


def full_payload(high: bytes, low: bytes) -> bytes:
    return len(high).to_bytes(4, "little") + high + low


def test_an_unchanged_chunk_is_same() -> None:
    encoded = encode_chunk(WORDS, bytearray(WORDS))
    assert (encoded.mode, encoded.payload) == (Mode.SAME, b"")
    assert decode_chunk(Mode.SAME, b"", len(WORDS), memoryview(WORDS)) == WORDS


def test_weights_are_full() -> None:
    encoded = encode_chunk(memoryview(WORDS), bytes(len(WORDS)))
    assert encoded.mode == Mode.FULL
    assert len(encoded.payload) < 0.72 * len(WORDS)
    assert decode_chunk(encoded.mode, bytearray(encoded.payload), len(WORDS)) == WORDS


def test_noise_is_raw() -> None:
    noise = RNG.bytes(10_001)
    encoded = encode_chunk(noise)
    assert (encoded.mode, encoded.payload) == (Mode.RAW, noise)
    assert decode_chunk(encoded.mode, encoded.payload, len(noise)) == noise


def test_a_base_of_another_length_is_never_same() -> None:
    assert encode_chunk(WORDS, WORDS + b"\0").mode == Mode.FULL


def test_the_full_layout_is_fixed() -> None:
    """0x8001 rotates to 0x0003, 0x3f80 (1.0) to 0x7f00; an odd last byte stands at the end."""
    high = zstandard.ZstdCompressor(level=1).compress(b"\x00\x7f")
    assert decode_chunk(Mode.FULL, full_payload(high, b"\x03\x00\xab"), 5) == b"\x01\x80\x80\x3f\xab"


def test_the_mode_numbers_are_fixed() -> None:
    assert [(mode.name, mode.value) for mode in Mode] == [
        ("SAME", 0), ("RAW", 1), ("FULL", 2), ("SPARSE", 3), ("DENSE", 4),
    ]  # fmt: skip


BOMB = zstandard.ZstdCompressor().compress(bytes(64 << 20))
UNSIZED = zstandard.ZstdCompressor(write_content_size=False).compress(b"abcd")
GOOD = zstandard.ZstdCompressor().compress(b"abcd")


@pytest.mark.parametrize(
    ("mode", "payload", "base"),
    [
        (Mode.SAME, b"", None),
        (Mode.SAME, b"", b"1234567"),
        (Mode.SAME, b"x", b"12345678"),
        (Mode.RAW, b"1234567", None),
        (Mode.RAW, b"123456789", None),
        (Mode.SPARSE, b"", b"12345678"),
        (Mode.DENSE, b"", b"12345678"),
        (Mode.FULL, b"", None),
        (Mode.FULL, b"\xff\xff\xff\xff", None),
        (Mode.FULL, full_payload(b"", b"1234"), None),
        (Mode.FULL, full_payload(b"garbage", b"1234"), None),
        (Mode.FULL, full_payload(GOOD, b"123"), None),
        (Mode.FULL, full_payload(GOOD, b"12345"), None),
        (Mode.FULL, full_payload(GOOD + b"x", b"1234"), None),
        (Mode.FULL, full_payload(GOOD[:-1], b"1234"), None),
        (Mode.FULL, full_payload(UNSIZED, b"1234"), None),
        (Mode.FULL, full_payload(BOMB, b"1234"), None),
    ],
)
def test_wrong_payloads_are_refused(mode: Mode, payload: bytes, base: bytes | None) -> None:
    with pytest.raises(IntegrityFault):
        decode_chunk(mode, payload, 8, base)
