"""Differences of words: the exact bytes of both layouts, every possible difference, and refused payloads."""

import tracemalloc
from collections.abc import Sequence
from itertools import count

import numpy as np
import pytest

from echo2d.core.base.zstd import compress, decompress
from echo2d.core.weights.delta_words import (
    decode_dense,
    decode_sparse,
    encode_dense,
    encode_sparse,
    find_changes,
    sparse_max,
)
from echo2d.errors import IntegrityFault

pytestmark = pytest.mark.usefixtures("codec")

BASE = np.arange(1000, dtype="<u2").tobytes()
BOMB = compress(bytes(64 << 20))


def payload(*columns: bytes, last: bytes = b"") -> bytes:
    """The columns compressed."""
    return packed(*map(compress, columns), last=last)


def packed(*frames: bytes, last: bytes = b"") -> bytes:
    return b"".join([*(len(frame).to_bytes(4, "little") for frame in frames), *frames, last])


def plain(data: bytes, lengths: Sequence[int]) -> list[bytes]:
    """The columns of a payload, which must be so long."""
    frames, start = [], 4 * len(lengths)
    for column, length in enumerate(lengths):
        size = int.from_bytes(data[4 * column : 4 * column + 4], "little")
        frames.append(decompress(data[start : start + size], length))
        start += size
    return [*frames, data[start:]]


def added(places: Sequence[int], by: Sequence[int], last: bytes = b"") -> bytes:
    """BASE with something added to words at these places."""
    words = np.frombuffer(BASE, "<u2").copy()
    words[list(places)] += np.array(by, np.int64).astype(np.uint16)
    return words.tobytes() + last


def test_the_sparse_layout_is_fixed() -> None:
    """Gaps 3, 0, 255 + 40 and 255 + 0; +1, -1, +2 (z = 4), -300 (z = 599: large)."""
    new = added([3, 4, 300, 556], [1, -1, 2, -300], b"\xab")
    changes = find_changes(new, BASE + b"\0")
    assert changes is not None
    assert changes.places.tolist() == [3, 4, 300, 556]
    data = encode_sparse(new, changes)
    columns = [
        bytes([3, 0, 255, 40, 255, 0]),
        bytes([2 | 0 << 2 | 3 << 4 | 3 << 6]),
        bytes([4, 255]),
        b"\x57\x02",
    ]
    assert plain(data, [6, 1, 2, 2]) == [*columns, b"\xab"]
    assert data == payload(*columns, last=b"\xab")
    assert decode_sparse(data, BASE + b"\0") == new


def test_the_dense_layout_is_fixed() -> None:
    new = added([0, 1, 3, 4], [-1, 1, -2, 0x8000], b"\xab")
    data = encode_dense(new, BASE + b"\0")
    assert data is not None
    codes = bytes([0 | 2 << 2 | 1 << 4 | 3 << 6, 3 | 1 << 2 | 1 << 4 | 1 << 6]) + b"\x55" * 248
    columns = [codes, bytes([3, 255]), b"\xff\xff"]
    assert plain(data, [250, 2, 2]) == [*columns, b"\xab"]
    assert data == payload(*columns, last=b"\xab")
    assert decode_dense(data, BASE + b"\0") == new


@pytest.mark.parametrize(
    "by", [1, 2, 127, 128, 129, 0x7FFF, 0x8000, 0x8001, 0xFF80, 0xFFFE, 0xFFFF]
)
def test_every_difference_of_words_round_trips(by: int) -> None:
    """NaNs, infinities, both zeros, signs; densely and sparsely."""
    base = np.arange(1 << 16, dtype="<u2")
    for third in range(3):
        new = base.copy()
        new[third::3] += np.uint16(by)
        data = encode_dense(new.tobytes(), base.tobytes())
        assert data is not None
        assert decode_dense(data, base.tobytes()) == new.tobytes()
    for eighth in range(8):
        new = base.copy()
        new[eighth::8] += np.uint16(by)
        changes = find_changes(new.tobytes(), base.tobytes())
        assert changes is not None
        assert decode_sparse(encode_sparse(new.tobytes(), changes), base.tobytes()) == new.tobytes()


def test_many_changes_are_not_sparse() -> None:
    limit = sparse_max(1000)
    assert limit == 150
    assert find_changes(added(range(limit), [1] * limit), BASE) is not None
    assert find_changes(added(range(limit + 1), [1] * (limit + 1)), BASE) is None


def test_chunks_with_nothing_in_common_are_not_dense() -> None:
    rng = np.random.default_rng(0)
    assert encode_dense(rng.bytes(20_000), rng.bytes(20_000)) is None


ONE = bytes([2])  # the code of +1, and three of padding


@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        bytes(15),
        payload(b"\x03", ONE, b"", b"")[:-1],
        payload(b"\x03", ONE, b"", b"") + b"x",
        b"\xff" * 16 + payload(b"\x03", ONE, b"", b"")[16:],
        payload(b"\x03", b"", b"", b""),
        payload(b"\x03", ONE, b"\x04", b""),
        payload(b"\x03", b"\x03", b"", b""),
        payload(b"\x03", b"\x03", b"\xff", b""),
        payload(b"\x03", b"\x03", b"\xff", b"\x01"),
        payload(b"\x03", b"\x03", b"\x04", b"\x01\x00"),
        payload(b"\xff", b"", b"", b""),
        payload(b"\x03\xff", ONE, b"", b""),
        payload(b"\xff" * 3 + bytes([235]), ONE, b"", b""),
        payload(bytes(151), bytes(38), b"", b""),
        payload(bytes(154), bytes(39), b"", b""),
        packed(BOMB, compress(ONE), b"", b""),
        packed(compress(b"\x03"), BOMB, b"", b""),
        packed(compress(b"\x03"), compress(b"\x03"), BOMB, b""),
        packed(compress(b"\x03"), compress(b"\x03"), compress(b"\xff"), BOMB),
        packed(compress(b"\x03")[:-1], compress(ONE), b"", b""),
    ],
    ids=count(),
)
def test_wrong_sparse_payloads_are_refused(wrong: bytes) -> None:
    tracemalloc.start()
    with pytest.raises(IntegrityFault):
        decode_sparse(wrong, BASE)
    assert tracemalloc.get_traced_memory()[1] < 8 * len(BASE)
    tracemalloc.stop()


def test_the_last_word_of_a_chunk_can_be_changed() -> None:
    assert decode_sparse(payload(b"\xff" * 3 + bytes([234]), ONE, b"", b""), BASE) == added(
        [999], [1]
    )
    assert decode_sparse(payload(b"", b"", b"", b""), BASE) == BASE


@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        payload(b"\x55" * 249, b"", b""),
        payload(b"\x55" * 251, b"", b""),
        payload(b"\x55" * 249 + b"\xff", b"\x04" * 3, b""),
        payload(b"\x55" * 249 + b"\xff", b"\x04" * 5, b""),
        payload(b"\x55" * 249 + b"\xd5", b"\xff", b""),
        payload(b"\x55" * 250, b"", b"", last=b"x"),
        packed(BOMB, b"", b""),
    ],
    ids=count(),
)
def test_wrong_dense_payloads_are_refused(wrong: bytes) -> None:
    with pytest.raises(IntegrityFault):
        decode_dense(wrong, BASE)


@pytest.mark.parametrize("share", [0.01, 0.14, 0.3, 1.0])
def test_decoding_takes_a_small_multiple_of_the_chunk_in_memory(share: float) -> None:
    rng = np.random.default_rng(0)
    base = rng.integers(0, 1 << 16, 1 << 19, dtype=np.uint16)
    new = base + rng.integers(-3, 4, base.size).astype(np.uint16) * (rng.random(base.size) < share)
    sides = new.tobytes(), base.tobytes()
    changes = find_changes(*sides)
    tracemalloc.start()
    if changes is None:
        dense = encode_dense(*sides)
        assert dense is not None
        assert decode_dense(dense, sides[1]) == sides[0]
    else:
        assert decode_sparse(encode_sparse(sides[0], changes), sides[1]) == sides[0]
    assert tracemalloc.get_traced_memory()[1] < 4 * len(sides[0])
    tracemalloc.stop()
