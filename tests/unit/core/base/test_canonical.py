"""Each value has one encoding."""

from dataclasses import dataclass

import msgpack
import pytest

from echo2d.core.base.canonical import canonical_unpacker, digest_of
from echo2d.core.base.codec import pack
from echo2d.errors import IntegrityFault


@dataclass(frozen=True, slots=True)
class Pair:
    left: int
    right: bytes


UNPACK = canonical_unpacker(Pair, bytes_max=64)


def test_a_packed_value_can_be_unpacked() -> None:
    assert UNPACK(pack(Pair(3, b"x"))) == Pair(3, b"x")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgpack.packb([3]),
        msgpack.packb([3, "text"]),
        msgpack.packb([-3, b"x"]),
        msgpack.packb([True, b"x"]),
        msgpack.packb([3, b"x"]) + b"\x00",
        b"\x92\xcd\x00\x03\xc4\x01x",  # 3 as a 16-bit integer
        msgpack.packb([3, b"x" * 64]),
    ],
)
def test_any_other_encoding_of_a_value_is_refused(data: bytes) -> None:
    with pytest.raises(IntegrityFault):
        UNPACK(data)


def test_a_digest_is_computed_with_blake3() -> None:
    assert digest_of(b"").hex().startswith("af1349b9f5f9a1a6a0404dea36dcc949")
