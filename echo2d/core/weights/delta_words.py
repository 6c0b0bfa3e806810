"""Encodes a chunk as differences to its base: 16-bit little-endian words, new - base modulo 2**16.

Training moves nearly every bf16 weight that it changes to a neighbouring value, which is a
difference of -1 or 1 between the words. As integers, words of any bit pattern (NaN, -0.0, other
types) come back exactly. Two layouts:

    sparse   u32 lengths of four columns | gaps | codes | small | large | odd last byte
    dense    u32 lengths of three columns |       codes | small | large | odd last byte

    gaps     sparse only, a byte per changed word: the number of unchanged words before it;
             255 means 255, continued in the next byte
    codes    two bits per word, lowest first: 0, 1, 2 mean -1, 0, 1; 3 means: see `small`
    small    a byte per code 3: z = 2 * d if the difference d >= 0, else -2 * d - 1;
             255 means: see `large`
    large    u16 z per 255 in `small`

Columns are zstd frames; an empty column has no bytes. The length of each column follows from the one
before it, and that of the gaps is bounded by the chunk, so no length in a payload is trusted. Wrong
payloads are an `IntegrityFault`.

The compiled loops (`echo2d.native`) are used if there are any; the numpy code here gives the same
bytes and refuses the same payloads.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from echo2d import native
from echo2d.core.base.canonical import Buffer, require
from echo2d.core.base.zstd import compress, declared_length, decompress
from echo2d.errors import IntegrityFault

Bytes = NDArray[np.uint8]
Words = NDArray[np.uint16]
Positions = NDArray[np.int64]


class Changes(NamedTuple):
    """The words of a chunk that differ from its base."""

    places: Positions  # the indices of the words, ascending
    differences: Words  # new - base


_LENGTH_BYTES = 4
# Words are processed in blocks, so that intermediate arrays stay in a core's cache.
_BLOCK_WORDS = 1 << 16
_GOES_ON = 255  # in a column of bytes: the value is continued elsewhere
_ESCAPED = 3  # code of a difference that is not -1, 0 or 1
# The four codes of every possible byte, as four bytes.
_UNPACKED = np.array(
    [sum((byte >> 2 * i & 3) << 8 * i for i in range(4)) for byte in range(256)], dtype="<u4"
)


def sparse_max(words: int) -> int:
    """The most changed words of a sparse chunk. With more, the gaps would take more bytes than the
    codes of all words.
    """
    return words * 3 // 20


def find_changes(new: Buffer, base: Buffer) -> Changes | None:
    """Return where and by how much the words differ; None if too many do for a sparse chunk."""
    mine, theirs = words_of(new), words_of(base)
    whole = mine.size // 4 * 4
    last = mine[whole:] - theirs[whole:]
    found, count = list[Changes](), 0
    # A block has 1 << 16 units of four words.
    for block in blocks_of(whole // 4, 1 << 16):
        found.append(_changes_in_fours(mine[:whole].view("<u8"), theirs[:whole].view("<u8"), block))
        count += found[-1].places.size
        if count > sparse_max(mine.size):
            return None
    found.append(Changes(whole + np.flatnonzero(last != 0), last[last != 0]))
    changes = Changes(*map(np.concatenate, zip(*found, strict=True)))
    return changes if changes.places.size <= sparse_max(mine.size) else None


def encode_sparse(new: Buffer, changes: Changes) -> bytes:
    """Return the payload. changes: what `find_changes` found."""
    return _payload([_gaps(changes.places).data, *_coded(changes.differences)], new)


def encode_found(new: Buffer, columns: Sequence[Buffer]) -> bytes:
    """Return the payload of a sparse chunk whose columns the compiled loops have made."""
    return _payload(columns, new)


def encode_dense(new: Buffer, base: Buffer) -> bytes | None:
    """Return the payload; None if it would not be smaller than the chunk."""
    loops = native.loops()
    columns = _dense_columns(new, base) if loops is None else loops.encode_dense(new, base)
    return _payload(columns, new) if sum(map(len, columns)) < len(new) else None


def _dense_columns(new: Buffer, base: Buffer) -> Sequence[bytes]:
    mine, theirs = words_of(new), words_of(base)
    blocks = [_coded(mine[block] - theirs[block]) for block in blocks_of(mine.size, _BLOCK_WORDS)]
    return [b"".join(block[column] for block in blocks) for column in range(3)]


def decode_sparse(payload: Buffer, base: Buffer, *, overwrite: bool = False) -> memoryview:
    """Return the chunk, which is as long as its base. overwrite: decode in the base's memory.

    Allocates at most about three times the chunk.
    """
    (frame, *columns), last = _columns(payload, 4, len(base))
    new, words = begin(base, last, overwrite=overwrite)
    gaps = _read_gaps(frame, words.size)
    changes = int(np.count_nonzero(gaps != _GOES_ON))
    require(changes <= sparse_max(words.size), "a sparse chunk changes too many words")
    loops = native.loops()
    if loops is not None:
        unpacked = _unpacked_columns(columns, changes, loops)
        accept(loops.decode_sparse(new.data, gaps.data, *unpacked))
        return new.data
    differences = np.empty(changes, np.uint16)
    for block, part in _decoded(columns, differences.size):
        differences[block] = part
    for places in _places(gaps, words.size):
        np.add.at(words, places, differences[: places.size])
        differences = differences[places.size :]
    return new.data


def decode_dense(payload: Buffer, base: Buffer, *, overwrite: bool = False) -> memoryview:
    """Return the chunk, which is as long as its base. overwrite: decode in the base's memory.

    Allocates at most about four times the chunk.
    """
    columns, last = _columns(payload, 3, len(base))
    new, words = begin(base, last, overwrite=overwrite)
    loops = native.loops()
    if loops is not None:
        accept(loops.decode_dense(new.data, *_unpacked_columns(columns, words.size, loops)))
        return new.data
    for block, differences in _decoded(columns, words.size):
        words[block] += differences
    return new.data


def _changes_in_fours(new: NDArray[np.uint64], base: NDArray[np.uint64], block: slice) -> Changes:
    """Compare four words at once, which is up to twice as fast if few have changed."""
    mine, theirs = new[block], base[block]
    fours = np.flatnonzero(mine != theirs)
    differences = mine.take(fours).view("<u2") - theirs.take(fours).view("<u2")
    changed = np.flatnonzero(differences != 0)
    places = fours.take(changed >> 2)
    places += block.start
    places <<= 2
    places += changed & 3
    return Changes(places, differences.take(changed))


def words_of(chunk: Buffer) -> Words:
    """Return a view of the words of a chunk."""
    return np.frombuffer(chunk, dtype="<u2", count=len(chunk) // 2)


def blocks_of(length: int, block: int) -> Iterator[slice]:
    """Yield slices of at most `block` items that cover `length` items."""
    return (slice(start, min(start + block, length)) for start in range(0, length, block))


def begin(base: Buffer, last: Buffer, *, overwrite: bool) -> tuple[Bytes, Words]:
    """Return the base or a copy of it, with the new odd last byte, and a view of its words."""
    there = np.frombuffer(base, dtype=np.uint8)
    new = there if overwrite else there.copy()
    new[len(base) - len(last) :] = np.frombuffer(last, dtype=np.uint8)
    return new, new[: len(base) - len(last)].view("<u2")


def accept(complaint: str | None) -> None:
    """Raise IntegrityFault if the compiled loops complain about a payload."""
    if complaint is not None:
        raise IntegrityFault(complaint)


# --- columns


def _payload(columns: Sequence[Buffer], new: Buffer) -> bytes:
    frames = [compress(column) for column in columns]
    lengths = b"".join(len(frame).to_bytes(_LENGTH_BYTES, "little") for frame in frames)
    return b"".join((lengths, *frames, memoryview(new)[len(new) // 2 * 2 :]))


def _columns(payload: Buffer, count: int, raw_len: int) -> tuple[list[memoryview], memoryview]:
    """Split a payload into its zstd frames and the odd last byte."""
    view, start = memoryview(payload), _LENGTH_BYTES * count
    require(len(view) >= start, "a delta chunk ends before its columns")
    lengths = np.frombuffer(view, dtype="<u4", count=count).tolist()
    require(
        start + sum(lengths) + raw_len % 2 == len(view),
        "a delta chunk has columns of the wrong length",
    )
    frames = []
    for length in lengths:
        frames.append(view[start : start + length])
        start += length
    return frames, view[start:]


def _gaps(changed: Positions) -> Bytes:
    wide = np.diff(changed, prepend=-1) - 1
    long = np.flatnonzero(wide >= _GOES_ON)
    more, last = np.divmod(wide[long], _GOES_ON)
    gaps = wide.astype(np.uint8)
    gaps[long] = last
    return np.insert(gaps, np.repeat(long, more), _GOES_ON)


def _read_gaps(frame: memoryview, words: int) -> Bytes:
    length = declared_length(frame)
    require(
        0 <= length <= sparse_max(words) + words // _GOES_ON, "a sparse chunk has too many gaps"
    )
    gaps = np.frombuffer(decompress(frame, length), dtype=np.uint8)
    require(length == 0 or int(gaps[-1]) != _GOES_ON, "a sparse chunk ends within a gap")
    return gaps


def _places(gaps: Bytes, words: int) -> Iterator[Positions]:
    """Yield the places at which gaps end, block by block, to keep the arrays small."""
    done = 0
    for block in blocks_of(gaps.size, _BLOCK_WORDS):
        ends = gaps[block] != _GOES_ON
        reached = np.cumsum(gaps[block] + ends, dtype=np.int64)
        reached += done
        done = int(reached[-1])
        require(done <= words, "a sparse chunk reaches past its end")
        yield reached.take(np.flatnonzero(ends)) - 1


def _coded(differences: Words) -> tuple[memoryview, memoryview, memoryview]:
    """Return the columns codes, small and large."""
    codes = np.minimum(differences + 1, _ESCAPED).astype(np.uint8)
    # Indexing with a mask instead takes four times as long.
    escaped = differences.take(np.flatnonzero(codes == _ESCAPED))
    zigzag = (escaped << 1) ^ -(escaped >> 15)
    large = zigzag[zigzag >= _GOES_ON]
    return (
        _packed(codes).data,
        np.minimum(zigzag, _GOES_ON).astype(np.uint8).data,
        large.view(np.uint8).data,
    )


def _decoded(frames: Sequence[memoryview], count: int) -> Iterator[tuple[slice, Words]]:
    """Yield `count` differences, block by block, with the slice that each block covers."""
    codes = _unpacked(decompress(frames[0], -(-count // 4)))[:count]
    small = np.frombuffer(
        decompress(frames[1], int(np.count_nonzero(codes == _ESCAPED))), dtype=np.uint8
    )
    large = np.frombuffer(
        decompress(frames[2], 2 * int(np.count_nonzero(small == _GOES_ON))), dtype="<u2"
    )
    for block in blocks_of(count, _BLOCK_WORDS):
        differences = codes[block].astype(np.uint16) - 1
        escaped = np.flatnonzero(codes[block] == _ESCAPED)
        zigzag, small = small[: escaped.size].astype(np.uint16), small[escaped.size :]
        goes_on = np.flatnonzero(zigzag == _GOES_ON)
        zigzag[goes_on], large = large[: goes_on.size], large[goes_on.size :]
        differences[escaped] = (zigzag >> 1) ^ -(zigzag & 1)
        yield block, differences


def _unpacked_columns(
    frames: Sequence[memoryview], count: int, loops: native.Loops
) -> tuple[bytes, bytes, bytes]:
    """Return the columns codes, small and large of `count` words."""
    codes = decompress(frames[0], -(-count // 4))
    small = decompress(frames[1], loops.count_escaped(codes, count))
    return codes, small, decompress(frames[2], 2 * small.count(_GOES_ON))


def _packed(codes: Bytes) -> Bytes:
    """Pack four codes into a byte."""
    whole = np.zeros(-(-codes.size // 4) * 4, np.uint8)
    whole[: codes.size] = codes
    four = whole.view("<u4")
    packed: Bytes = (four | four >> 6 | four >> 12 | four >> 18).astype(np.uint8)
    return packed


def _unpacked(packed: bytes) -> Bytes:
    codes: Bytes = _UNPACKED[np.frombuffer(packed, dtype=np.uint8)].view(np.uint8)
    return codes
