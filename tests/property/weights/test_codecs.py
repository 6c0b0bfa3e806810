"""The compiled loops and numpy give the same bytes, and refuse the same payloads, at every level."""

import random
from collections.abc import Callable

import numpy as np
import pytest

from echo2d import native
from echo2d.core.base.canonical import Buffer
from echo2d.core.weights.delta import (
    ChunkMode,
    EncodedChunk,
    decode_chunk,
    encode_chunk,
    encode_delta,
)
from echo2d.core.weights.delta_full import encode_full
from echo2d.core.weights.delta_split import encode_split
from echo2d.core.weights.delta_words import encode_dense, find_changes, sparse_max
from echo2d.errors import IntegrityFault
from tests.support.fuzz import Fuzz, damaged

COMPILED = native.available()[1:]
pytestmark = pytest.mark.skipif(not COMPILED, reason="the loops are not compiled here")


def sides(rng: random.Random) -> tuple[bytes, bytes]:
    """A chunk and its base: words like weights or any, few or many of them changed, by little or much."""
    numbers = np.random.default_rng(rng.getrandbits(32))
    size = rng.choice((0, 1, 2, 63, 64, 65, 128, 200, 700, rng.randrange(3000)))
    base = numbers.integers(0, 1 << 16, size, np.uint16)
    if rng.random() < 0.7:
        spread = np.float32(10.0 ** rng.uniform(-5, 0))
        base = (numbers.standard_normal(size, np.float32) * spread).view(np.uint32) >> 16
        base = base.astype(np.uint16)
    new = base.copy()
    share = rng.choice((0.0, 0.001, 0.01, 0.1, 0.149, 0.15, 0.2, 0.6, 1.0))
    places = np.flatnonzero(numbers.random(size) < share)
    by = rng.choice(([1, -1], [1, -1, 1, -1, 2, -2, 40], [127, -127, 128, -128, 1 << 15, 20_000]))
    new[places] += numbers.choice(np.array(by), places.size).astype(np.uint16)
    odd = rng.random() < 0.3
    last = rng.choice((b"a", b"b")) if odd else b""
    return new.tobytes() + last, base.tobytes() + (b"b" if odd else b"")


def encodings(new: bytes, base: bytes) -> list[EncodedChunk]:
    """Of all modes that the chunk can have, with the codec in use."""
    found = [encode_delta(new, base), EncodedChunk(ChunkMode.FULL, encode_full(new))]
    if (dense := encode_dense(new, base)) is not None:
        found.append(EncodedChunk(ChunkMode.DENSE, dense))
    if (changes := find_changes(new, base)) is not None:
        payload = encode_split(new, base, changes)
        if (loops := native.loops()) is not None:
            compiled = loops.encode_sparse(new, base, sparse_max(len(new) // 2), split=True)
            assert compiled is not None
            payload = compiled[1] + new[len(new) // 2 * 2 :]
        found.append(EncodedChunk(ChunkMode.SPLIT, payload))
    return [each for each in found if each is not None]


def outcome(decode: Callable[[], Buffer]) -> bytes | None:
    """None: refused."""
    try:
        return bytes(decode())
    except IntegrityFault:
        return None


def test_all_codecs_encode_and_decode_alike(fuzz: Fuzz) -> None:
    for _ in fuzz.share(0.1):
        new, base = sides(fuzz.rng)
        with native.using("numpy"):
            expected = encodings(new, base)
        for codec in COMPILED:
            with native.using(codec):
                assert encodings(new, base) == expected, codec
                chosen = encode_chunk(new, base)
                assert decode_chunk(chosen.mode, chosen.payload, len(new), base) == new
        for each in expected:
            for codec in native.available():
                with native.using(codec):
                    assert decode_chunk(each.mode, each.payload, len(new), base) == new, codec


def test_all_codecs_refuse_the_same_payloads(fuzz: Fuzz) -> None:
    """What one of them decodes, all decode to the same bytes."""
    rng, refused = fuzz.rng, 0
    with native.using("numpy"):
        right = [(*pair, each) for pair in map(sides, [rng] * 50) for each in encodings(*pair)]
    for _ in fuzz.share(0.5):
        _, base, encoded = rng.choice(right)
        mode = rng.choice((encoded.mode, encoded.mode, ChunkMode.SPLIT, ChunkMode.SPARSE))
        payload = damaged(rng, encoded.payload)
        if rng.random() < 0.3:
            base = base[: rng.randrange(len(base) + 1)]
        outcomes = set()
        for codec in native.available():
            with native.using(codec):
                outcomes.add(outcome(lambda: decode_chunk(mode, payload, len(base), base)))  # noqa: B023
        assert len(outcomes) == 1, (mode, payload, base)
        refused += outcomes == {None}
    assert refused


def test_changes_at_the_edges_of_what_is_sparse() -> None:
    base = bytes(2 * 1000)
    for changed in (sparse_max(1000) - 1, sparse_max(1000), sparse_max(1000) + 1):
        new = b"\1\0" * changed + base[2 * changed :]
        modes = set()
        for codec in native.available():
            with native.using(codec):
                encoded = encode_delta(new, base)
                assert encoded is not None
                modes.add((encoded.mode, encoded.payload))
        assert len(modes) == 1


def test_many_threads_at_once(fuzz: Fuzz) -> None:
    """The loops share nothing."""
    from concurrent.futures import ThreadPoolExecutor

    pairs = [sides(fuzz.rng) for _ in range(100)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda pair: encode_chunk(*pair), pairs * 3))
    assert together == [encode_chunk(*pair) for pair in pairs] * 3
