"""zstd frames whose content has a length that their reader knows. Wrong frames are `IntegrityFault`.

A frame declares the length of its content, and the decompressor would believe it and allocate that much: it is compared
with what is expected first. Nothing is compressed to nothing.
"""

import zstandard

from echo2d.core.base.canonical import Buffer, require
from echo2d.errors import IntegrityFault

LEVEL = 1  # higher levels buy at most 2 % for a multiple of the time


def compress(data: Buffer) -> bytes:
    """One frame; nothing if there is no data."""
    frame: bytes = zstandard.ZstdCompressor(level=LEVEL).compress(data) if len(data) else b""
    return frame


def declared_length(frame: Buffer) -> int:
    """What the frame says of its content; -1 if it says nothing."""
    try:
        length: int = zstandard.frame_content_size(frame) if len(frame) else 0
    except zstandard.ZstdError as error:
        raise IntegrityFault("what should be a zstd frame is none") from error
    return length


def decompress(frame: Buffer, length: int) -> bytes:
    """The frame's content, which must be `length` bytes."""
    require(declared_length(frame) == length, "a zstd frame declares the wrong length")
    if not len(frame):
        return b""
    try:
        data: bytes = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise IntegrityFault("a zstd frame does not decompress") from error
    require(len(data) == length, "a zstd frame has content of the wrong length")
    return data
