"""Undo what an apply in place does to one chunk.

An undo record holds the places of the words that change and their *old values*:

    words   changed words (u32) | length of gaps (u32) | gaps | old words | odd last byte
    gaps    a zstd frame of u32: the distance from one changed word to the next

A record that would not be smaller than the chunk is the old chunk itself, and none is needed where
nothing changes. Old values, and not differences, because a kill may leave a chunk half old and half
new: writing old values is right for either half, and may be repeated. Not here: where records are
kept, and how a torn one is recognised (`store/slots/undo_log.py`).
"""

import struct

import numpy as np

from echo2d.core.base.canonical import Buffer, require
from echo2d.core.base.zstd import compress, decompress
from echo2d.core.weights.delta_words import find_changes, words_of

_HEAD = struct.Struct("<II")


def encode_undo(new: Buffer, old: Buffer) -> bytes | None:
    """Return the record that turns any mixture of both, of equal length, back into `old`. None:
    they are equal.
    """
    changes = find_changes(new, old)
    if changes is None:
        return bytes(old)
    odd = len(old) // 2 * 2
    if not changes.places.size and new[odd:] == old[odd:]:
        return None
    gaps = compress(np.diff(changes.places, prepend=0).astype("<u4").data.cast("B"))
    words = words_of(old)[changes.places].tobytes()
    record = b"".join((_HEAD.pack(changes.places.size, len(gaps)), gaps, words, bytes(old[odd:])))
    return record if len(record) < len(old) else bytes(old)


def apply_undo(record: Buffer, chunk: bytearray) -> None:
    """Restore the old bytes in `chunk`. IntegrityFault: the record does not fit it."""
    if len(record) == len(chunk):
        chunk[:] = record
        return
    require(len(record) >= _HEAD.size, "an undo record is too short")
    count, length = _HEAD.unpack_from(record)
    odd, values = len(chunk) // 2 * 2, _HEAD.size + length
    require(
        len(record) == values + 2 * count + len(chunk) - odd, "an undo record has a wrong length"
    )
    gaps = np.frombuffer(decompress(memoryview(record)[_HEAD.size : values], 4 * count), "<u4")
    places = np.cumsum(gaps, dtype=np.int64)
    require(not count or int(places[-1]) < odd // 2, "an undo record reaches past its chunk")
    words = np.frombuffer(chunk, dtype="<u2", count=odd // 2)
    words[places] = np.frombuffer(record, dtype="<u2", count=count, offset=values)
    chunk[odd:] = record[len(record) - (len(chunk) - odd) :]
