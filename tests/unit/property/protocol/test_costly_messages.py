"""No message of a stranger is expensive to refuse, however deeply it is nested.

A message is built from a random structure of lists, maps, texts and numbers, up to the limit of bytes, and given to
every codec that a peer reaches.
"""

import tracemalloc
from collections.abc import Callable

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2d.core.base.codec import MESSAGE_BYTES_MAX, VALUES_MAX
from echo2d.core.protocol.control_messages import TO_COORDINATOR, TO_PEER
from echo2d.errors import PeerFault

MEMORY_MAX = 64 << 20
LARGE = "LeaseProgress"  # a tag that may have MESSAGE_BYTES_MAX
Filler = Callable[[int], bytes]


def list_head(items: int) -> bytes:
    return b"\xdd" + items.to_bytes(4, "big")


def lists_of(inner: bytes, width: int) -> Filler:
    """Lists of `width` times `inner`, as many as fit."""
    one = b"\xdc" + width.to_bytes(2, "big") + inner * width

    def fill(room: int) -> bytes:
        count = min(8192, room // len(one))
        return b"\xdc" + count.to_bytes(2, "big") + one * count

    return fill


def nested(depth: int) -> Filler:
    one = b"\x91" * depth + b"\x90"
    return lambda room: b"\xdc\x1f\x40" + one * min(8000, room // len(one))


BOMBS: dict[str, Filler] = {
    "deep": nested(500),
    "empty lists": lists_of(b"\x90", 511),
    "empty maps": lists_of(b"\x80", 511),
    "numbers": lists_of(b"\x01", 8000),
    "long numbers": lists_of(b"\xcf" + b"\x7f" * 8, 8000),
    "floats": lists_of(b"\xcb" + b"\x7f" * 8, 8000),
    "short texts": lists_of(b"\xa2ab", 8000),
    "one map": lambda room: b"\xdf\x00\x08\x00\x00" + b"\xa3abc\x01" * (room // 6),
    "declared and missing": lambda room: b"\xdc\x1f\xff" * min(500, room // 3),
    "extension": lambda room: b"\xc9" + (room - 6).to_bytes(4, "big") + b"\x01" + bytes(room - 6),
}


def bomb(fill: Filler, tag: str = LARGE) -> bytes:
    head: bytes = b"\x94" + msgpack.packb(tag) + b"\x01\x01"
    return head + fill(MESSAGE_BYTES_MAX - len(head))


@pytest.mark.parametrize("kind", BOMBS)
def test_a_bomb_is_refused_before_it_takes_memory(kind: str) -> None:
    data = bomb(BOMBS[kind])
    assert len(data) <= MESSAGE_BYTES_MAX
    tracemalloc.start()
    try:
        with pytest.raises(PeerFault):
            TO_COORDINATOR.decode(data)
        assert tracemalloc.get_traced_memory()[1] < MEMORY_MAX
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("tag", sorted(set(TO_COORDINATOR.messages)))
def test_only_kinds_of_messages_with_long_lists_may_be_large(tag: str) -> None:
    data = b"\x92" + msgpack.packb(tag) + msgpack.packb(bytes(100_000))
    with pytest.raises(PeerFault) as refused:
        TO_COORDINATOR.decode(data)
    of_tokens = ("LeaseProgress", "SampleFinished", "PromptRead")
    large = tag in ("Hello", "DeltasKept", "TransferReport", *of_tokens)
    assert ("are allowed" in str(refused.value)) != large


def test_values_are_counted_however_they_are_nested() -> None:
    def message(lists: int) -> bytes:
        packed: bytes = msgpack.packb([LARGE, 1, 1, [[0] * 99 for _ in range(lists)]])  # 100 each
        return packed

    fits = (VALUES_MAX - 4) // 100
    with pytest.raises(PeerFault, match="SampleDelta"):
        TO_COORDINATOR.decode(message(fits))
    with pytest.raises(PeerFault, match="malformed"):
        TO_COORDINATOR.decode(message(fits + 1))


scalars = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats()
values = st.recursive(
    scalars | st.text(max_size=9) | st.binary(max_size=40),
    lambda inner: (
        st.lists(inner, max_size=9) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=40,
)
tags = st.sampled_from(sorted({*TO_COORDINATOR.messages, *TO_PEER.messages, "x", ""}))


@given(tag=tags, fields=st.lists(values, max_size=14), times=st.integers(1, 2000))
def test_any_structure_is_decoded_or_refused(tag: str, fields: list[object], times: int) -> None:
    """Nothing but PeerFault comes out, and what is decoded is the same message again."""
    data = msgpack.packb([tag, *fields, [fields] * (times // (1 + len(str(fields))))])
    for codec in (TO_COORDINATOR, TO_PEER):
        for given_data in (data, data[:-1], msgpack.packb([tag, *fields])):
            try:
                message = codec.decode(given_data)
            except PeerFault:
                continue
            assert codec.decode(codec.encode(message)) == message
