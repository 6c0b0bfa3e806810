"""The chunk codec: the mode that is chosen, and payloads that are refused in every mode."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from echo2d.core.weights.delta import ChunkMode, decode_chunk, encode_chunk
from echo2d.errors import IntegrityFault

pytestmark = pytest.mark.usefixtures("codec")

RNG = np.random.default_rng(7)
WORDS = (
    (RNG.standard_normal(1 << 17).astype(np.float32).view(np.uint32) >> 16).astype("<u2").tobytes()
)


def changed(share: float, *, by: Sequence[int] = (-1, 1)) -> bytes:
    """WORDS with this share of them changed."""
    words = np.frombuffer(WORDS, "<u2").copy()
    places = RNG.permutation(words.size)[: round(share * words.size)]
    words[places] += RNG.choice(np.array(by).astype(np.uint16), places.size)
    return words.tobytes()


def test_an_unchanged_chunk_has_the_mode_same() -> None:
    encoded = encode_chunk(WORDS, bytearray(WORDS))
    assert (encoded.mode, encoded.payload) == (ChunkMode.SAME, b"")
    assert decode_chunk(ChunkMode.SAME, b"", len(WORDS), memoryview(WORDS)) == WORDS


@pytest.mark.parametrize(
    ("share", "mode", "most"),
    [
        (0.0001, ChunkMode.SPARSE, 0.003),
        (0.01, ChunkMode.SPARSE, 0.0074),
        (0.1, ChunkMode.SPARSE, 0.042),
        (0.14, ChunkMode.SPARSE, 0.053),
        (0.16, ChunkMode.DENSE, 0.066),
        (0.5, ChunkMode.DENSE, 0.12),
        (1.0, ChunkMode.DENSE, 0.085),
    ],
)
def test_the_size_of_a_changed_chunk_follows_its_changes(
    share: float, mode: ChunkMode, most: float
) -> None:
    new = changed(share)
    encoded = encode_chunk(memoryview(new), memoryview(WORDS))
    assert encoded.mode in (mode, ChunkMode.SPLIT)
    assert len(encoded.payload) < most * len(new)
    assert (
        decode_chunk(encoded.mode, memoryview(encoded.payload), len(new), memoryview(WORDS)) == new
    )


def test_a_chunk_with_one_changed_byte_has_the_mode_sparse() -> None:
    encoded = encode_chunk(WORDS + b"a", WORDS + b"b")
    assert (encoded.mode, len(encoded.payload)) == (ChunkMode.SPARSE, 17)
    assert (
        decode_chunk(ChunkMode.SPARSE, encoded.payload, len(WORDS) + 1, WORDS + b"b")
        == WORDS + b"a"
    )


def test_weights_without_a_base_have_the_mode_full() -> None:
    encoded = encode_chunk(memoryview(WORDS), RNG.bytes(len(WORDS)))
    assert encoded.mode == ChunkMode.FULL
    assert len(encoded.payload) < 0.72 * len(WORDS)
    assert decode_chunk(encoded.mode, bytearray(encoded.payload), len(WORDS)) == WORDS


def test_a_chunk_of_noise_has_the_mode_raw() -> None:
    noise = RNG.bytes(10_001)
    for base in (None, RNG.bytes(10_001), RNG.bytes(9)):
        encoded = encode_chunk(noise, base)
        assert (encoded.mode, encoded.payload) == (ChunkMode.RAW, noise)
    assert decode_chunk(encoded.mode, encoded.payload, len(noise)) == noise


def test_float32_weights_round_trip() -> None:
    """Its low halves change wherever anything does; the high ones seldom."""
    base = RNG.standard_normal(1 << 14).astype(np.float32)
    new = base * np.float32(1 + 1e-5)
    encoded = encode_chunk(new.tobytes(), base.tobytes())
    assert len(encoded.payload) < 0.62 * new.nbytes
    assert decode_chunk(encoded.mode, encoded.payload, new.nbytes, base.tobytes()) == new.tobytes()


def test_a_chunk_with_a_base_of_another_length_never_has_the_mode_same() -> None:
    assert encode_chunk(WORDS, WORDS + b"\0").mode == ChunkMode.FULL


def test_chunks_are_independent_of_each_other() -> None:
    """Whatever other threads encode meanwhile."""
    news = [changed(share) for share in (0.0, 0.01, 0.1, 0.3, 1.0)] * 4
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda new: encode_chunk(new, WORDS), news))
    assert together == [encode_chunk(new, WORDS) for new in news]


def test_the_mode_numbers_are_fixed() -> None:
    assert [(mode.name, mode.value) for mode in ChunkMode] == [
        ("SAME", 0), ("RAW", 1), ("FULL", 2), ("SPARSE", 3), ("DENSE", 4), ("SPLIT", 5),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "payload", "base"),
    [
        (ChunkMode.SAME, b"", None),
        (ChunkMode.SAME, b"", b"1234567"),
        (ChunkMode.SAME, b"x", b"12345678"),
        (ChunkMode.RAW, b"1234567", None),
        (ChunkMode.RAW, b"123456789", None),
        (ChunkMode.FULL, b"", None),
        (ChunkMode.SPARSE, b"", b"12345678"),
        (ChunkMode.SPARSE, bytes(16), None),
        (ChunkMode.SPARSE, bytes(16), b"1234567"),
        (ChunkMode.DENSE, b"", b"12345678"),
        (ChunkMode.DENSE, bytes(12), None),
        (ChunkMode.SPLIT, b"", b"12345678"),
        (ChunkMode.SPLIT, bytes(68), None),
        (ChunkMode.SPLIT, bytes(68), b"1234567"),
    ],
)
def test_wrong_payloads_are_refused(mode: ChunkMode, payload: bytes, base: bytes | None) -> None:
    with pytest.raises(IntegrityFault):
        decode_chunk(mode, payload, 8, base)
