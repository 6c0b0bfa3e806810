"""Columns are joined with their tokens, are whole or absent, and stay within their limits."""

import numpy as np
import pytest

from echo2d.core.base.codec import MESSAGE_BYTES_MAX
from echo2d.core.base.ids import Digest, LeaseId, PeerId, Version
from echo2d.core.protocol.columns import (
    ANSWER_BYTES_MAX,
    COLUMN_AXES_MAX,
    COLUMNS_MAX,
    TOKEN_BYTES,
    Column,
    Columns,
    columns_bytes,
    columns_fault,
    join_columns,
)
from echo2d.core.protocol.control_messages import (
    TO_COORDINATOR,
    LeaseProgress,
    SampleDelta,
    SampleFinished,
    VersionSpan,
)
from echo2d.core.protocol.trajectory import NOTHING, AuthoredSpan, Partial, pack_tokens
from tests.support.column_engine import columns_of, experts_of

ANYONE = AuthoredSpan(0, 3, Version(1), Digest(b"v" * 32), PeerId("w"))


def written(before: Partial, tokens: list[int], columns: Columns | None = None) -> Partial:
    span = ANYONE._replace(end=len(tokens))
    data = pack_tokens(tokens)
    made = columns_of(tokens) if columns is None else columns
    return before.plus(data, bytes(len(data)), [span], shift=before.length, columns=made)


def experts(partial: Partial) -> list[int]:
    """The first number of each token's experts."""
    (column,) = [each for each in partial.columns if each.name == "experts"]
    assert column.array.shape == (partial.length, 2, 3)
    return [int(each) for each in column.array[:, 0, 0]]


def test_a_column_is_an_array_of_its_tokens() -> None:
    experts_column, half = columns_of([7, 9])
    assert np.array_equal(experts_column.array, experts_of([7, 9]))
    assert half.array.tolist() == [3.5, 4.5]
    assert half.array.dtype == np.float16
    assert not half.array.flags.writeable


def test_two_attempts_are_joined_at_the_token_and_cut_there() -> None:
    whole = written(written(NOTHING, [1, 2, 3]), [4, 5])
    assert experts(whole) == [1, 2, 3, 4, 5]
    assert experts(whole.first(4)) == [1, 2, 3, 4]


def test_given_tokens_have_zeros_before_between_and_behind() -> None:
    opening = NOTHING.with_given(pack_tokens([50, 51]))
    assert opening.columns == ()
    one = written(opening, [3, 4]).with_given(pack_tokens([52]))
    assert experts(one) == [0, 0, 3, 4, 0]
    assert experts(written(one, [5])) == [0, 0, 3, 4, 0, 5]


@pytest.mark.parametrize(
    "other",
    [
        (),
        (Column("experts", "u16", (3, 2), bytes(12)), columns_of([4])[1]),
        (Column("experts", "f16", (2, 3), bytes(12)), columns_of([4])[1]),
        (Column("else", "u16", (2, 3), bytes(12)), columns_of([4])[1]),
    ],
)
def test_a_column_that_differs_between_attempts_is_absent(other: Columns) -> None:
    for whole in (
        written(written(NOTHING, [1]), [4], other),
        written(written(NOTHING, [4], other), [1]),
    ):
        assert [each.name for each in whole.columns] == ["half"] * len(other[1:])
    lost = written(written(NOTHING, [1], ()), [4])
    assert lost.columns == ()
    assert written(lost, [5]).columns == ()


def test_partials_that_differ_only_in_columns_are_equal() -> None:
    """A later attempt may lose them, and goes on from the same tokens all the same."""
    assert written(NOTHING, [1]) == written(NOTHING, [1], ())


def test_columns_that_would_make_an_answer_too_large_are_absent() -> None:
    tokens = ANSWER_BYTES_MAX // (TOKEN_BYTES + 512)
    wide = (
        Column("wide", "u8", (512,), bytes(512 * tokens)),
        Column("slim", "u8", (), bytes(tokens)),
    )
    assert [each.name for each in join_columns([(tokens, wide)])] == ["wide"]
    more = tuple([each._replace(data=each.data[: each.token_bytes * 10]) for each in wide])
    assert [each.name for each in join_columns([(tokens, wide), (10, more)])] == ["slim"]


def test_the_largest_answer_fits_into_a_message() -> None:
    """Also with a span for each few tokens, as after very many refits."""
    tokens = ANSWER_BYTES_MAX // (TOKEN_BYTES + 1024)
    wide = Column("wide", "f32", (2, 128), bytes(1024 * tokens))
    assert not columns_fault((wide,), tokens)
    digest, data = Digest(b"d" * 32), bytes(4 * tokens)
    spans = tuple(VersionSpan(at, at + 1, Version(at), digest) for at in range(tokens))
    assert len(spans) > 2900
    result = SampleFinished(LeaseId(1), 0, 0, data, data, spans, "length", (wide,))
    progress = LeaseProgress(LeaseId(1), 0, (SampleDelta(0, data, data, spans, (wide,)),))
    for message in (result, progress):
        packed = TO_COORDINATOR.encode(message)
        assert len(packed) < MESSAGE_BYTES_MAX
        assert TO_COORDINATOR.decode(packed) == message


def test_an_answer_without_columns_is_one_byte_longer() -> None:
    result = SampleFinished(LeaseId(1), 0, 0, b"\1\0\0\0", bytes(4), (), "stop")
    assert TO_COORDINATOR.encode(result)[-1:] == b"\x90"


@pytest.mark.parametrize(
    ("columns", "fault"),
    [
        ([Column(f"c{n}", "u8", (), b"12") for n in range(COLUMNS_MAX + 1)], "expected at most 8, found 9"),
        ([Column("Experts", "u8", (), b"12")], "a column's name: expected"),
        ([Column("e" * 33, "u8", (), b"12")], "a column's name: expected"),
        ([Column("é", "u8", (), b"12")], "a column's name: expected"),
        ([Column("", "u8", (), b"12")], "a column's name: expected"),
        ([Column("a\n", "u8", (), b"12")], "a column's name: expected"),
        ([Column("a", "u8", (1,) * (COLUMN_AXES_MAX + 1), b"12")], "expected at most 4 axes, found 5"),
        ([Column("a", "u8", (0,), b"")], "expected axes of 1 to"),
        ([Column("a", "u8", (1 << 62,) * 4, b"")], "expected axes of 1 to"),
        ([Column("a", "u16", (1025,), bytes(4100))], "found 2050 where 2048 are left"),
        (
            [Column("a", "u8", (2000,), bytes(4000)), Column("b", "u8", (49,), bytes(98))],
            "column b: expected at most 2048 bytes for a token in all columns, found 49 where 48 are left",
        ),
        ([Column("a", "u8", (), b"1")], "expected 2 bytes for 2 tokens, found 1"),
        ([Column("a", "u32", (2,), bytes(17))], "expected 16 bytes for 2 tokens, found 17"),
        ([Column("a", "u8", (), b"12")] * 2, "expected different names"),
    ],
)  # fmt: skip
def test_columns_stay_within_their_limits(columns: list[Column], fault: str) -> None:
    found = columns_fault(tuple(columns), 2)
    assert fault in found
    assert ";" in found, "it says what to do"


def test_columns_larger_than_an_answer_may_be_are_refused() -> None:
    tokens = ANSWER_BYTES_MAX // (TOKEN_BYTES + 1) + 1
    column = Column("a", "u8", (), bytes(tokens))
    assert "answers of at most" in columns_fault((column,), tokens)
    assert not columns_fault((column._replace(data=bytes(tokens - 1)),), tokens - 1)
    assert columns_bytes((column,)) == tokens
