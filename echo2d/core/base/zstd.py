"""Compress and decompress zstd frames whose content length the reader knows in advance.

A frame declares the length of its content, and the decompressor would allocate that much. So the
declared length is compared with the expected one first. Empty data is an empty frame. A wrong frame
is an `IntegrityFault`.
"""

import zstandard

from echo2d.core.base.canonical import Buffer, require
from echo2d.errors import IntegrityFault


def compress(data: Buffer) -> bytes:
    """Compress into one frame; empty data gives an empty frame."""
    # Higher levels save at most 2 % and take several times as long.
    frame: bytes = zstandard.ZstdCompressor(level=1).compress(data) if len(data) else b""
    return frame


def declared_length(frame: Buffer) -> int:
    """The content length that the frame declares; -1 if it declares none."""
    try:
        length: int = zstandard.frame_content_size(frame) if len(frame) else 0
    except zstandard.ZstdError as error:
        raise IntegrityFault("expected a zstd frame; found other bytes") from error
    return length


def decompress(frame: Buffer, length: int) -> bytes:
    """Return the frame's content. IntegrityFault: it is not exactly `length` bytes."""
    require(declared_length(frame) == length, "a zstd frame declares the wrong length")
    if not len(frame):
        return b""
    try:
        data: bytes = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise IntegrityFault("a zstd frame does not decompress") from error
    require(len(data) == length, "a zstd frame has content of the wrong length")
    return data
