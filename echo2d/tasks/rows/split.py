"""Divides rows into training rows and held-out rows, by the hash of their question.

So the same question is always on the same side, in any file and any order.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import TypeVar

from blake3 import blake3

from echo2d.errors import OperatorFault
from echo2d.tasks.base import NoMorePrompts, Split

KEY_CHARS = 16  # hex digits; of 37 million data sets of a million questions, one has two equal keys


def row_key(question: str) -> str:
    """The name of a row: a hash of its question."""
    return blake3(question.encode("utf-8", "surrogatepass")).hexdigest()[:KEY_CHARS]


def is_held_out(key: str, share: float) -> bool:
    """Whether the row with this key is held out. share: of all rows."""
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


GeneratedRow = TypeVar("GeneratedRow")


@dataclass(frozen=True, slots=True)
class GeneratedSide:
    """One side of rows that are generated without end. OperatorFault: there is no such side."""

    kind: str  # kind of the task, for errors
    split: Split
    held_out: float  # the share of the questions that is never trained on

    def __post_init__(self) -> None:
        if self.split not in ("train", "heldout"):
            raise OperatorFault(
                f'{self.kind}: split: expected "train" or "heldout"; found {self.split!r}'
            )
        if not 0 <= self.held_out < 1 or (self.split == "heldout" and not self.held_out):
            raise OperatorFault(
                f"{self.kind}: held_out: expected 0 to less than 1; found {self.held_out}"
            )

    def row(
        self, index: int, make: Callable[[int], tuple[str, GeneratedRow]]
    ) -> tuple[str, GeneratedRow]:
        """Row `index` of this side, with its key: the first of several candidates that is on this side.

        make: gives candidate n, with its key. NoMorePrompts: no candidate is on this side.
        """
        share = self.held_out if self.split == "heldout" else 1 - self.held_out
        # With this many candidates per index, one index in exp(40) has none on the wanted side.
        candidates = ceil(40 / share)
        for number in range(index * candidates, (index + 1) * candidates):
            key, item = make(number)
            if is_held_out(key, self.held_out) == (self.split == "heldout"):
                return key, item
        raise NoMorePrompts
