"""Columns: joining and cutting keeps each token's numbers, and any bytes are refused or whole."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from echo2d.core.base.codec import pack, unpacker
from echo2d.core.protocol.columns import (
    COLUMN_BYTES_PER_TOKEN_MAX,
    ELEMENT_BYTES,
    Column,
    Columns,
    columns_fault,
    cut_columns,
    join_columns,
)
from echo2d.core.protocol.control_messages import SampleDelta
from echo2d.errors import PeerFault

elements = st.sampled_from(sorted(ELEMENT_BYTES))
shapes = st.lists(st.integers(1, 4), max_size=4).map(tuple)
names = st.from_regex(r"\A[a-z][a-z0-9_]{0,5}\Z")


@st.composite
def answers(draw: st.DrawFn) -> tuple[int, Columns]:
    tokens = draw(st.integers(0, 12))
    kinds = draw(
        st.lists(st.tuples(names, elements, shapes), max_size=4, unique_by=lambda each: each[0])
    )
    left, found = COLUMN_BYTES_PER_TOKEN_MAX, []
    for name, element, shape in kinds:
        empty = Column(name, element, shape, b"")
        if empty.token_bytes <= left:
            left -= empty.token_bytes
            size = tokens * empty.token_bytes
            found.append(empty._replace(data=draw(st.binary(min_size=size, max_size=size))))
    return tokens, tuple(found)


@given(answers(), st.lists(st.integers(0, 12), max_size=5))
def test_columns_that_were_cut_and_joined_again_are_unchanged(
    answer: tuple[int, Columns], places: list[int]
) -> None:
    tokens, columns = answer
    assert not columns_fault(columns, tokens)
    edges = [0, *sorted(min(place, tokens) for place in places), tokens]
    pieces = [(end - start, cut_columns(columns, start, end)) for start, end in pairwise(edges)]
    for (count, piece), start in zip(pieces, edges, strict=False):
        assert not columns_fault(piece, count)
        for whole, part in zip(columns, piece, strict=True):
            assert part.array.tobytes() == whole.array[start : start + count].tobytes()
    assert join_columns(pieces) == (columns if tokens else ())
    for column in columns:
        assert column.array.shape == (tokens, *column.shape)
        assert np.asarray(column.array).nbytes == len(column.data)


unpack = unpacker(SampleDelta, bytes_max=1 << 16, grows=True)
numbers = st.integers(0, 3) | st.integers(0, (1 << 63) - 1)
hostile = st.builds(
    Column,
    names | st.text(max_size=40),
    elements,
    st.lists(numbers, max_size=6).map(tuple),
    st.binary(max_size=40),
)


@given(st.lists(hostile, max_size=10).map(tuple), numbers)
def test_hostile_columns_are_refused_or_arrays(columns: Columns, tokens: int) -> None:
    """However large the numbers are that they name, nothing of that size is made."""
    found = unpack(pack(SampleDelta(0, b"", b"", (), columns)))
    assert found.columns == columns
    if not columns_fault(columns, tokens):
        assert all(len(column.array) == tokens for column in columns)


@given(answers(), st.integers(0, 1 << 16), st.integers(1, 255))
def test_damaged_bytes_of_columns_are_refused_or_valid(
    answer: tuple[int, Columns], at: int, by: int
) -> None:
    data = bytearray(pack(SampleDelta(0, b"", b"", (), answer[1])))
    data[at % len(data)] ^= by
    try:
        found = unpack(bytes(data))
    except PeerFault:
        return
    if not columns_fault(found.columns, answer[0]):
        assert all(len(column.array) == answer[0] for column in found.columns)
