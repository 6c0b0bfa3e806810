"""Changes split into classes: the exact bytes, the smallest and largest numbers, and refused payloads."""

import tracemalloc
from itertools import count

import numpy as np
import pytest

from echo2d import native
from echo2d.core.weights.delta import ChunkMode, decode_chunk, encode_chunk, encode_twice
from echo2d.core.weights.delta_chain import compose_chunks
from echo2d.core.weights.delta_split import CLASSES, decode_split
from echo2d.core.weights.delta_words import Changes, find_changes, sparse_max
from echo2d.errors import IntegrityFault
from tests.support.numpy_split import encode_split

pytestmark = pytest.mark.usefixtures("codec")

SMALL, LARGE = 0x3000, 0x3F00  # words of the classes 0 and 15


def split(new: bytes, base: bytes) -> bytes:
    changes = find_changes(new, base)
    assert changes is not None
    return encode_split(new, base, changes)


def words(*values: int) -> bytes:
    return np.array(values, "<u2").tobytes()


def head(counts: dict[int, int], escapes: int) -> bytes:
    return np.array([*(counts.get(each, 0) for each in range(CLASSES)), escapes], "<u4").tobytes()


# Small and large words alternate. The second small word changes by +1 and the fifth by -5; the tenth
# large word changes by -1.
BASE = words(*[SMALL, LARGE] * 10)
NEW = bytearray(BASE)
NEW[4:6], NEW[16:18], NEW[38:40] = words(SMALL + 1), words(SMALL - 5), words(LARGE - 1)
# Gaps 1, 2 and 9 take the parameter 1 and so many zeros as 0, 1, 4; the low bits 1, 0, 1. The second
# change is negative, and so is the third. One change comes before the escaped one, whose size is 3.
LAYOUT = b"".join(
    (
        head({0: 2, 15: 1}, 1),
        bytes([1 | 0 << 4, 1]),
        bytes([0b110]),
        bytes([0b101, 0b1]),
        bytes([0b10000101, 0b1010]),
    )
)


def test_the_layout_of_a_split_delta_is_fixed() -> None:
    assert split(bytes(NEW) + b"a", BASE + b"b") == LAYOUT + b"a"
    assert decode_split(LAYOUT + b"a", BASE + b"b") == bytes(NEW) + b"a"


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 127, 128, 129, 1000, 70_000])
def test_chunks_of_all_lengths_round_trip(size: int) -> None:
    rng = np.random.default_rng(size)
    base = rng.integers(0, 1 << 16, size, np.uint16)
    new = base.copy()
    places = rng.choice(size, size * 3 // 20, replace=False)
    new[places] += rng.choice(np.array([1, 0xFFFF, 2, 0x8000, 0x7FFF, 300], np.uint16), places.size)
    payload = split(new.tobytes(), base.tobytes())
    assert decode_split(payload, base.tobytes()) == new.tobytes()
    chunk = bytearray(base.tobytes())
    assert decode_split(payload, chunk, overwrite=True) == new.tobytes()
    assert chunk == new.tobytes()


def test_the_widest_gap_between_changes_round_trips() -> None:
    base = bytes(2 * (1 << 20))
    new = base[:-2] + b"\1\0"
    payload = split(new, base)
    assert len(payload) < 80
    assert decode_split(payload, base) == new


def weights(share_of_small: float) -> tuple[bytes, bytes]:
    """Of words like weights; small ones change so much more often."""
    rng = np.random.default_rng(3)
    base = (rng.normal(0, 0.02, 1 << 17).astype(np.float32).view("<u4") >> 16).astype("<u2")
    small = (base >> 7 & 255) < 120
    new = base.copy()
    places = np.flatnonzero(rng.random(base.size) < np.where(small, share_of_small, 0.0001))
    new[places] += rng.choice(np.array([1, 0xFFFF], np.uint16), places.size)
    return new.tobytes(), base.tobytes()


def test_the_encoder_chooses_a_split_delta_if_it_is_smaller(codec: str) -> None:
    new, base = weights(0.05)
    sent, kept = encode_twice(new, base)
    assert sent == encode_chunk(new, base)
    assert kept.mode == ChunkMode.SPARSE
    assert decode_chunk(kept.mode, kept.payload, len(new), base) == new
    if codec == "numpy":
        assert sent is kept, "not tried"
        return
    assert sent.mode == ChunkMode.SPLIT
    assert len(sent.payload) < 0.9 * len(kept.payload)
    assert sent.payload == split(new, base)


def test_a_split_delta_cannot_be_composed() -> None:
    new, base = weights(0.05)
    sent, kept = encode_twice(new, base)
    later, _ = encode_twice(base, new)
    assert compose_chunks([sent], len(new)) == sent
    if sent is not kept:
        with pytest.raises(IntegrityFault, match="without its base"):
            compose_chunks([kept, later], len(new))
    whole = encode_chunk(base)
    assert compose_chunks([whole, sent], len(new)) == encode_chunk(new)


def changed(at: int, by: bytes) -> bytes:
    return LAYOUT[:at] + by + LAYOUT[at + len(by) :]


@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        LAYOUT[:67],
        LAYOUT[:68],
        LAYOUT[:70],
        LAYOUT[:72],
        LAYOUT[:-1],
        LAYOUT + b"\0",
        LAYOUT + b"\1",
        LAYOUT + bytes(1000) + b"\1",
        changed(0, b"\xff\xff\xff\xff"),  # changes of a class
        changed(0, b"\4"),
        changed(0, b"\1"),
        changed(0, b"\0\0\0\0" + b"\2"),  # of another class, of which there are no words
        changed(64, b"\4"),  # escapes
        changed(64, b"\2"),
        changed(64, b"\0"),
        changed(68, b"\xff"),  # parameters
        changed(68, b"\0"),
        LAYOUT[:73] + b"\xff\xff",  # unary
        LAYOUT[:73] + b"\0\0",
        LAYOUT[:73] + b"\x05\x15",  # the third gap reaches past the end
        LAYOUT[:73] + b"\x85\x28",  # more changes before the escaped one than there are
    ],
    ids=count(),
)
def test_wrong_payloads_of_a_split_delta_are_refused(wrong: bytes) -> None:
    with pytest.raises(IntegrityFault):
        decode_split(wrong, BASE)


def with_size(low_bits: bytes) -> bytes:
    """LAYOUT with another size of its escape, in the parameter 15."""
    return LAYOUT[:69] + b"\x0f" + LAYOUT[70:72] + low_bits + bytes([0b10000101, 0b110])


def test_the_largest_difference_round_trips() -> None:
    new = bytearray(NEW)
    new[16:18] = words(SMALL + 0x8000)
    assert decode_split(with_size(b"\xfe\x7f"), BASE) == new
    with pytest.raises(IntegrityFault):
        decode_split(with_size(b"\xff\x7f"), BASE)


def test_the_largest_number_of_changes_round_trips() -> None:
    base = words(*[SMALL] * 20)
    for most in (3, 4):
        new = words(*[SMALL + 1] * most, *[SMALL] * (20 - most))
        payload = encode_split(new, base, Changes(np.arange(most), np.full(most, 1, np.uint16)))
        if most == sparse_max(20):
            assert decode_split(payload, base) == new
        else:
            with pytest.raises(IntegrityFault):
                decode_split(payload, base)


def test_a_payload_of_zeros_takes_little_memory() -> None:
    base = bytes(1 << 20)
    payloads = [
        head({0: 70_000}, 70_000) + bytes((1 << 20) - 68),
        head({0: 70_000}, 70_000) + bytes(30_000),
        head({0: 78_643}, 78_643) + b"\xff" * 130_000,
        head({0: 78_643}, 78_643) + b"\xff" * ((1 << 20) - 68),
    ]
    for payload in payloads:
        native.free_memory()
        tracemalloc.start()
        with pytest.raises(IntegrityFault):
            decode_split(payload, base)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 4 << 20
