"""Encodes split chunks in numpy, plainly as `delta_split` describes them; compiled loops are compared with it."""

from collections.abc import Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from echo2d.core.base.canonical import Buffer
from echo2d.core.weights.delta_split import (
    _RICE_BLOCK,
    _RICE_MAX,
    CLASSES,
    RiceNumbers,
    _classified,
    _gaps,
    _low_lengths,
    _spread,
)
from echo2d.core.weights.delta_words import Bytes, Changes, Words, words_of


def encode_split(new: Buffer, base: Buffer, changes: Changes) -> bytes:
    """Return the payload. changes: from `delta_words.find_changes`."""
    theirs = words_of(base)
    differs = np.zeros(theirs.size, np.bool_)
    differs[changes.places] = True
    difference_at = words_of(new) - theirs
    gaps: list[list[RiceNumbers]] = [[] for _ in range(CLASSES)]
    differences: list[list[Words]] = [[] for _ in range(CLASSES)]
    after = np.zeros(CLASSES, np.int64)  # for each class, the rank after its last change
    for block, found in _classified(theirs):
        in_order = differs[block].take(found.order)
        for each in range(CLASSES):
            start, end = int(found.starts[each]), int(found.starts[each + 1])
            changed = np.flatnonzero(in_order[start:end])
            if changed.size:
                ranks = changed + int(found.seen[each])
                gaps[each].append(_gaps(ranks, int(after[each])))
                after[each] = int(ranks[-1]) + 1
                differences[each].append(
                    difference_at[block].take(found.order[start:end].take(changed))
                )
    counts = np.array([sum(part.size for part in parts) for parts in gaps], dtype="<u4")
    return payload_of(
        counts,
        np.concatenate([np.empty(0, np.int32), *chain.from_iterable(gaps)]),
        np.concatenate([np.empty(0, np.uint16), *chain.from_iterable(differences)]),
        memoryview(new)[2 * theirs.size :],
    )


def payload_of(
    counts: NDArray[np.uint32], gaps: RiceNumbers, differences: Words, last: Buffer
) -> bytes:
    sizes = np.where(differences >> 15, -differences, differences)
    escaped = np.flatnonzero(sizes > 1)
    lists = (gaps, _gaps(escaped), sizes[escaped].astype(np.int32) - 2)
    parameters = [_parameters(numbers) for numbers in lists]
    return b"".join(
        (
            counts.tobytes(),
            escaped.size.to_bytes(4, "little"),
            _nibbles(np.concatenate(parameters)).data,
            np.packbits(differences >> 15, bitorder="little").data,
            *map(_low_bits, lists, parameters),
            _unary([n >> _spread(k, n.size) for n, k in zip(lists, parameters, strict=True)]).data,
            last,
        )
    )


def _parameters(numbers: RiceNumbers) -> Bytes:
    """For each block, the smallest of the parameters with which it takes the fewest bits."""
    starts = np.arange(0, numbers.size, _RICE_BLOCK)
    if not starts.size:
        return np.empty(0, np.uint8)
    bits = np.empty((_RICE_MAX + 1, starts.size), np.int64)
    sizes = np.diff(starts, append=numbers.size)
    for k in range(_RICE_MAX + 1):
        bits[k] = np.add.reduceat(numbers >> k, starts, dtype=np.int64) + sizes * k
    best: Bytes = bits.argmin(axis=0).astype(np.uint8)
    return best


def _low_bits(numbers: RiceNumbers, parameters: Bytes) -> bytes:
    lengths = _low_lengths(parameters, numbers.size)
    ends = np.cumsum(lengths)
    out = np.zeros(int(lengths.sum()), np.uint8)
    whole = np.zeros(parameters.size * _RICE_BLOCK, np.int32)
    whole[: numbers.size] = numbers
    for k in np.unique(parameters[parameters > 0]).tolist():
        for at in np.flatnonzero(parameters == k).tolist():
            block = whole[_RICE_BLOCK * at : _RICE_BLOCK * (at + 1)]
            packed = np.packbits(block[:, None] >> np.arange(k) & 1, bitorder="little")
            out[int(ends[at] - lengths[at]) : int(ends[at])] = packed[: int(lengths[at])]
    return out.tobytes()


def _unary(lists: Sequence[RiceNumbers]) -> Bytes:
    """Write each number as that many zeros and a one."""
    zeros = np.concatenate(lists)
    ones = np.cumsum(zeros + np.int64(1)) - 1
    bits = np.zeros(int(ones[-1]) + 1 if ones.size else 0, np.uint8)
    bits[ones] = 1
    return np.packbits(bits, bitorder="little")


def _nibbles(values: Bytes) -> Bytes:
    """Pack two values into each byte."""
    whole = np.zeros(-(-values.size // 2) * 2, np.uint8)
    whole[: values.size] = values
    packed: Bytes = (whole[::2] | whole[1::2] << 4).astype(np.uint8)
    return packed
