"""Divides rows into those for training and held-out ones, by the hash of what they ask.

So the same question is always on the same side, in whatever file and order it comes.
"""

from array import array
from collections.abc import Callable

from blake3 import blake3

from echo2d.tasks.base import Split

KEY_CHARS = 16  # hex digits; two of a million questions share a key once in 37 million data sets


def row_key(question: str) -> str:
    """The name of a row: a hash of the text that it asks."""
    return blake3(question.encode("utf-8", "surrogatepass")).hexdigest()[:KEY_CHARS]


def is_held_out(key: str, share: float) -> bool:
    """Whether the row with this key is held out, if this share of all rows is."""
    # The first half of the key decides: 32 bits are fine enough for a share.
    return int(key[: KEY_CHARS // 2], 16) < share * (1 << 32)


def rows_of(
    split: Split, count: int, key: Callable[[int], str], *, held_out: float
) -> "array[int]":
    """The numbers of this split's rows, in order. key: gives the key of each row."""
    wanted = split == "heldout"
    if not held_out:
        return array("L", () if wanted else range(count))
    return array("L", (n for n in range(count) if is_held_out(key(n), held_out) == wanted))
