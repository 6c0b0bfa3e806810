"""Encodes a sparse chunk with its changes split into classes by the magnitude of the base words.

A train step moves a small weight to a neighbouring bf16 value far more often than a large one. Both
sides know the base, and so the class of each word. A gap counts only the unchanged words of one
class. Within a class changes are distributed as if at random. Rice codes suit such gaps, and need
no tables. Layout:

    u32 number of changes in each of the 16 classes | u32 number of escapes | parameters | signs
    | low bits | unary | odd last byte

    class         of a base word: its bits 7 to 14 (the exponent of bf16) less 110, at least 0 and
                  at most 15
    order         changes are sorted by class; within a class they are in the order of their words
    gaps          for each change: the number of unchanged words of its class since the previous
                  change in this class
    signs         a bit for each change: 1 if the difference (new - base as a signed number) is < 0
    escapes       the changes by more than 1: first, for each escape, the number of changes between
                  the previous escape and this one; then, for each escape, its |difference| - 2
    parameters    four bits k for each 128 numbers of the gaps, then of the two lists of escapes
    low bits      the k lowest bits of each number; each 128 numbers begin with a new byte
    unary         for each number n: n >> k zeros, and a one

Bits fill a byte from the lowest on. Nothing is compressed further, so no payload can unpack to more
than its size. The lengths of parameters, signs and low bits follow from the numbers of changes and
escapes, which are bounded by the chunk; unary is the rest, and bounded too.

The classes are those of the base: without it a split chunk cannot be decoded, not even as a part of a
chain of deltas (`delta_chain`). Only the compiled loops encode; the numpy code here decodes without
them. Wrong payloads are an `IntegrityFault`.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from echo2d import native
from echo2d.core.base.canonical import Buffer, require
from echo2d.core.weights.delta_words import (
    Bytes,
    Words,
    accept,
    begin,
    blocks_of,
    sparse_max,
)

RiceNumbers = NDArray[np.int32]

CLASSES = 16
_LOWEST = 110  # bits 7 to 14 of the largest words of class 0; bf16: below 2**-16
_HEAD_BYTES = 4 * (CLASSES + 1)
_RICE_BLOCK = 128  # numbers that share a parameter
_RICE_MAX = 15  # the largest parameter


class _Classified(NamedTuple):
    """A block of words, sorted by their classes."""

    order: NDArray[np.int64]  # the words' indices, sorted by class
    starts: NDArray[np.int64]  # where each class starts in `order`, and the end of the last
    seen: NDArray[np.int64]  # how many words of each class come before the block


def decode_split(payload: Buffer, base: Buffer, *, overwrite: bool = False) -> memoryview:
    """Return the chunk, which is as long as its base. overwrite: decode in the base's memory.

    Allocates at most about three times the chunk.
    """
    view, odd = memoryview(payload), len(base) % 2
    require(len(view) >= _HEAD_BYTES + odd, "a split chunk ends before its columns")
    columns, last = view[: len(view) - odd], view[len(view) - odd :]
    new, words = begin(base, last, overwrite=overwrite)
    loops = native.loops()
    if loops is not None:
        accept(loops.decode_split(new.data, columns, sparse_max(words.size)))
        return new.data
    counts = np.frombuffer(columns, dtype="<u4", count=CLASSES).astype(np.int64)
    gaps, differences = _read(columns, counts, words.size)
    _apply(words, counts, gaps, differences)
    return new.data


def _apply(words: Words, counts: NDArray[np.int64], gaps: RiceNumbers, differences: Words) -> None:
    """Add the differences to the words that the gaps lead to."""
    ends = np.cumsum(counts)
    nexts = ends - counts  # the next change of each class
    after = np.zeros(CLASSES, np.int64)
    for block, found in _classified(words):
        sizes = np.diff(found.starts)
        for each in np.flatnonzero((nexts < ends) & (sizes > 0)).tolist():
            # The block has at most as many changes of the class as it has words of the class.
            first = int(nexts[each])
            most = min(int(ends[each]), first + int(sizes[each]))
            ranks = np.cumsum(gaps[first:most] + np.int64(1)) + (int(after[each]) - 1)
            here = int(np.searchsorted(ranks, int(found.seen[each]) + int(sizes[each])))
            if here:
                places = ranks[:here] + (int(found.starts[each]) - int(found.seen[each]))
                words[block][found.order.take(places)] += differences[first : first + here]
                nexts[each] += here
                after[each] = int(ranks[here - 1]) + 1
    require(bool(np.all(nexts == ends)), "a split chunk reaches past its end")


def _classified(words: Words) -> Iterator[tuple[slice, _Classified]]:
    seen = np.zeros(CLASSES, np.int64)
    # Words are classified in blocks, so that their arrays stay in the cache.
    for block in blocks_of(words.size, 1 << 16):
        high = (words[block] >> 7 & 255).astype(np.uint8)
        classes = np.minimum(np.maximum(high, _LOWEST) - _LOWEST, CLASSES - 1).astype(np.uint8)
        sizes = np.bincount(classes, minlength=CLASSES)
        starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes)))
        yield block, _Classified(np.argsort(classes, kind="stable"), starts, seen)
        seen = seen + sizes


def _gaps(ranks: NDArray[np.int64], start: int = 0) -> RiceNumbers:
    """How many places are between each rank and the one before it, or `start` for the first."""
    gaps: RiceNumbers = (np.diff(ranks, prepend=start - 1) - 1).astype(np.int32)
    return gaps


# --- columns


def _read(columns: memoryview, counts: NDArray[np.int64], words: int) -> tuple[RiceNumbers, Words]:
    """Return the gaps and differences of all changes."""
    count = int(counts.sum())
    escapes = int.from_bytes(columns[4 * CLASSES : _HEAD_BYTES], "little")
    require(count <= sparse_max(words), "a split chunk changes too many words")
    require(escapes <= count, "a split chunk has too many large differences")
    lengths = (count, escapes, escapes)
    blocks = [-(-length // _RICE_BLOCK) for length in lengths]
    start = _HEAD_BYTES + -(-sum(blocks) // 2)
    low_start = start + -(-count // 8)
    require(low_start <= len(columns), "a split chunk ends before its columns")
    nibbles = _read_nibbles(columns[_HEAD_BYTES:start], sum(blocks))
    parameters = np.split(nibbles, np.cumsum(blocks[:2]))
    low_bytes = [
        int(_low_lengths(k, length).sum()) for k, length in zip(parameters, lengths, strict=True)
    ]
    unary = columns[min(low_start + sum(low_bytes), len(columns)) :]
    require(low_start + sum(low_bytes) <= len(columns), "a split chunk ends before its columns")
    zeros_max = 2 * sum(lengths) + (words >> _RICE_MAX)
    require(len(unary) <= (sum(lengths) + zeros_max + 7) // 8, "a split chunk has too many gaps")
    zeros = _read_unary(unary, sum(lengths))
    lists = []
    # The last of these limits is the largest |difference| - 2 of an escape.
    for length, largest, k, low in zip(
        lengths, (words, count, (1 << 15) - 2), parameters, low_bytes, strict=True
    ):
        lists.append(_numbers(zeros[:length], k, columns[low_start : low_start + low], largest))
        zeros, low_start = zeros[length:], low_start + low
    signs = np.unpackbits(
        np.frombuffer(columns[start : start + -(-count // 8)], np.uint8),
        count=count,
        bitorder="little",
    )
    differences = 1 - 2 * signs.astype(np.uint16)
    places = np.cumsum(lists[1] + np.int64(1)) - 1
    require(not escapes or int(places[-1]) < count, "a split chunk reaches past its changes")
    differences[places] *= (lists[2] + 2).astype(np.uint16)
    return lists[0], differences


# --- numbers in Rice codes


def _spread(parameters: Bytes, count: int) -> Bytes:
    """The parameter of each number."""
    return np.repeat(parameters, _RICE_BLOCK)[:count]


def _low_lengths(parameters: Bytes, count: int) -> NDArray[np.int64]:
    """The bytes of the low bits of each block."""
    sizes = np.full(parameters.size, _RICE_BLOCK, np.int64)
    sizes[-1:] = count - _RICE_BLOCK * (parameters.size - 1)
    return (sizes * parameters + 7) // 8


def _numbers(zeros: RiceNumbers, parameters: Bytes, low: memoryview, largest: int) -> RiceNumbers:
    """Put the numbers together again. IntegrityFault: one is larger than `largest`."""
    numbers, source = np.empty(zeros.size, np.int32), np.frombuffer(low, np.uint8)
    lengths = _low_lengths(parameters, zeros.size)
    for at, (k, end) in enumerate(
        zip(parameters.tolist(), np.cumsum(lengths).tolist(), strict=True)
    ):
        block = slice(_RICE_BLOCK * at, min(_RICE_BLOCK * (at + 1), zeros.size))
        size = block.stop - block.start
        found = zeros[block].astype(np.int64) << k
        if k:
            packed = source[end - int(lengths[at]) : end]
            bits = np.unpackbits(packed, count=size * k, bitorder="little").reshape(size, k)
            found |= bits.astype(np.int64) @ (1 << np.arange(k))
        require(int(found.max()) <= largest, "a split chunk has impossible numbers")
        numbers[block] = found
    return numbers


def _read_unary(stream: memoryview, count: int) -> RiceNumbers:
    """How many zeros come before each of `count` ones; the last one is in the last byte."""
    packed = np.frombuffer(stream, np.uint8)
    require(not packed.size or int(packed[-1]) != 0, "a split chunk has numbers left over")
    zeros, filled, after = np.empty(count, np.int32), 0, 0
    # The unary stream is unpacked in blocks of 64 KiB.
    for block in blocks_of(packed.size, 1 << 16):
        ones = np.flatnonzero(np.unpackbits(packed[block], bitorder="little"))
        require(filled + ones.size <= count, "a split chunk has numbers left over")
        if ones.size:
            ones += 8 * block.start
            zeros[filled : filled + ones.size] = _gaps(ones, after)
            filled, after = filled + ones.size, int(ones[-1]) + 1
    require(filled == count, "a split chunk has impossible numbers")
    return zeros


def _read_nibbles(packed: memoryview, count: int) -> Bytes:
    source = np.frombuffer(packed, np.uint8)
    return np.stack((source & 15, source >> 4), axis=1).ravel()[:count]
