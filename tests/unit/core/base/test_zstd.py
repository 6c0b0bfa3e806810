"""Frames of a known length: any other frame is refused before it is decompressed."""

import tracemalloc
from itertools import count

import pytest
import zstandard

from echo2d.core.base.zstd import compress, declared_length, decompress
from echo2d.errors import IntegrityFault

GOOD = compress(b"abcd" * 100)
BOMB = zstandard.ZstdCompressor().compress(bytes(64 << 20))
UNSIZED = zstandard.ZstdCompressor(write_content_size=False).compress(b"abcd")
SKIPPABLE = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"abcd"
LYING = GOOD[:5] + (401 - 256).to_bytes(2, "little") + GOOD[7:]


def test_a_compressed_frame_can_be_decompressed() -> None:
    assert decompress(GOOD, 400) == b"abcd" * 100
    assert decompress(memoryview(bytearray(GOOD)), 400) == b"abcd" * 100
    assert declared_length(GOOD) == 400


def test_no_bytes_make_an_empty_frame() -> None:
    assert compress(b"") == b""
    assert decompress(b"", 0) == b""
    assert declared_length(b"") == 0


@pytest.mark.parametrize(
    ("frame", "length"),
    [
        (b"", 4),
        (GOOD, 0),
        (GOOD, 399),
        (GOOD[:-1], 400),
        (GOOD + b"x", 400),
        (LYING, 401),
        (UNSIZED, 4),
        (SKIPPABLE, 4),
        (SKIPPABLE, 0),
        (BOMB, 400),
        (b"no frame at all", 400),
    ],
    ids=count(),
)
def test_frames_of_another_length_are_refused(frame: bytes, length: int) -> None:
    tracemalloc.start()
    with pytest.raises(IntegrityFault):
        decompress(frame, length)
    assert tracemalloc.get_traced_memory()[1] < 1 << 16
    tracemalloc.stop()
