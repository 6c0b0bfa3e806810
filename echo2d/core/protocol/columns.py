"""Columns: named numbers beside each token of an answer, such as the experts that a layer chose.

An engine may write columns, and a run keeps the columns that it names. Columns travel with the tokens, through
the hand-over of an unfinished answer and the ledger, and the learner gets them as arrays. All code in between carries
them without interpreting them. A column is whole or absent: a trajectory has it if each engine that wrote some of its
tokens wrote the column, with the same element and shape. Given tokens, which no engine wrote, have zeros in every
column. Not here: what a column means, and what needs it.
"""

import math
import re
from collections.abc import Collection, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Element = Literal["u8", "u16", "u32", "f16", "f32"]
ELEMENT_BYTES: dict[Element, int] = {"u8": 1, "u16": 2, "u32": 4, "f16": 2, "f32": 4}

COLUMNS_MAX = 8  # of one trajectory; `columns_fault` compares each with each
COLUMN_NAME = re.compile("[a-z][a-z0-9_]{0,31}")
COLUMN_AXES_MAX = 4  # layers, experts, and two to spare
# All columns together take at most this much: 8 experts of 61 layers take 976 bytes as u16, 10 of 60 layers 1,200.
COLUMN_BYTES_PER_TOKEN_MAX = 2048
# Tokens, logprobs and columns of one answer take at most this much, so that with its spans the answer
# fits into a control message of 4 MiB. At 384 bytes a token (8 experts of 48 layers) that is 8,024
# tokens.
ANSWER_BYTES_MAX = 3 << 20
TOKEN_BYTES = 8  # int32, and the logprob as float32


class Column(NamedTuple):
    """One column of consecutive tokens."""

    name: str
    element: Element
    # The shape of one token's numbers; () is a single number.
    shape: tuple[int, ...]
    # The numbers of the first token, then of the next, little-endian and row by row.
    data: bytes

    @property
    def token_bytes(self) -> int:
        return ELEMENT_BYTES[self.element] * math.prod(self.shape)

    @property
    def array(self) -> NDArray[Any]:
        """The numbers [tokens, *shape], read-only. Only for a column without a `columns_fault`."""
        dtype = f"<{self.element[0]}{ELEMENT_BYTES[self.element]}"
        return np.frombuffer(self.data, dtype=dtype).reshape(-1, *self.shape)


Columns = tuple[Column, ...]


def columns_fault(columns: Columns, tokens: int) -> str:
    """Return what is wrong with the columns of this many tokens, or "" if nothing is.

    Columns come from strangers, so each number is checked against its limit before it is used.
    """
    if len(columns) > COLUMNS_MAX:
        return f"columns: expected at most {COLUMNS_MAX}, found {len(columns)}; write fewer"
    left = COLUMN_BYTES_PER_TOKEN_MAX
    for column in columns:
        if COLUMN_NAME.fullmatch(column.name) is None:
            return f"a column's name: expected {COLUMN_NAME.pattern}, found {column.name[:40]!r}; rename it"
        axes, name = len(column.shape), f"column {column.name}"
        if axes > COLUMN_AXES_MAX:
            return f"{name}: expected at most {COLUMN_AXES_MAX} axes, found {axes}; flatten it"
        if not all(0 < length <= COLUMN_BYTES_PER_TOKEN_MAX for length in column.shape):
            return f"{name}: expected axes of 1 to {COLUMN_BYTES_PER_TOKEN_MAX}, found {column.shape}; mend its shape"
        if column.token_bytes > left:
            return (
                f"{name}: expected at most {COLUMN_BYTES_PER_TOKEN_MAX} bytes for a token in all columns, "
                f"found {column.token_bytes} where {left} are left; write fewer or smaller numbers"
            )
        left -= column.token_bytes
        if len(column.data) != tokens * column.token_bytes:
            return (
                f"{name}: expected {tokens * column.token_bytes} bytes for {tokens} tokens, "
                f"found {len(column.data)}; write each token's numbers once"
            )
    if len({column.name for column in columns}) != len(columns):
        return "columns: expected different names, found one twice; rename one"
    size = tokens * (TOKEN_BYTES + COLUMN_BYTES_PER_TOKEN_MAX - left)
    if columns and size > ANSWER_BYTES_MAX:
        return f"columns: expected answers of at most {ANSWER_BYTES_MAX} bytes, found {size}; leave one out"
    return ""


def columns_bytes(columns: Columns) -> int:
    return sum([len(column.data) for column in columns])


def wanted_columns(columns: Columns, names: Collection[str]) -> Columns:
    """The columns that the run names; others would fill the coordinator's memory and the batches."""
    return tuple([each for each in columns if each.name in names])


def cut_columns(columns: Columns, start: int, end: int) -> Columns:
    """The columns of tokens [start, end)."""
    return tuple([
        each._replace(data=each.data[start * each.token_bytes : end * each.token_bytes])
        for each in columns
    ])  # fmt: skip


def blank_columns(like: Columns, tokens: int) -> Columns:
    """The same columns for this many given tokens, with zeros."""
    return tuple([each._replace(data=bytes(tokens * each.token_bytes)) for each in like])


def join_columns(parts: Sequence[tuple[int, Columns]]) -> Columns:
    """Join the columns of consecutive parts. Only columns that every part has in the same shape are joined.

    parts: how many tokens each has, and its columns. A column that would make the answer larger than
    ANSWER_BYTES_MAX is left out.
    """
    parts = [part for part in parts if part[0]]
    if not parts or not all(columns for _, columns in parts):
        return ()
    found: list[Column] = []
    size = TOKEN_BYTES * sum([tokens for tokens, _ in parts])
    for column in parts[0][1]:
        alike = [each for _, columns in parts for each in columns if each[:3] == column[:3]]
        size += (more := columns_bytes(tuple(alike)))
        if len(alike) == len(parts) and size <= ANSWER_BYTES_MAX:
            found.append(column._replace(data=b"".join([each.data for each in alike])))
        else:
            size -= more
    return tuple(found)
