"""The exponent plane: its exact bytes, and refused payloads."""

from itertools import count

import pytest

from echo2d.core.base.zstd import compress
from echo2d.core.weights.delta_full import decode_full
from echo2d.errors import IntegrityFault

pytestmark = pytest.mark.usefixtures("codec")

GOOD = compress(b"abcd")


def payload(high: bytes, low: bytes) -> bytes:
    return len(high).to_bytes(4, "little") + high + low


def test_the_layout_of_the_exponent_plane_is_fixed() -> None:
    """0x8001 rotates to 0x0003, 0x3f80 (1.0) to 0x7f00; an odd last byte stands at the end."""
    data = decode_full(payload(compress(b"\x00\x7f"), b"\x03\x00\xab"), 5)
    assert bytes(data) == b"\x01\x80\x80\x3f\xab"


@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        b"\xff\xff\xff\xff",
        payload(b"", b"1234"),
        payload(b"garbage", b"1234"),
        payload(GOOD, b"123"),
        payload(GOOD, b"12345"),
        payload(GOOD + b"x", b"1234"),
        payload(GOOD[:-1], b"1234"),
        payload(compress(bytes(64 << 20)), b"1234"),
    ],
    ids=count(),
)
def test_wrong_payloads_of_the_mode_full_are_refused(wrong: bytes) -> None:
    with pytest.raises(IntegrityFault):
        decode_full(wrong, 8)
