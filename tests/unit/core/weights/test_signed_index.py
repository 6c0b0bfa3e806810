"""Roots: canonical, bounded, strict."""

from dataclasses import replace

import pytest

from echo2d.core.base.canonical import digest_of
from echo2d.core.base.codec import INT_MAX
from echo2d.core.base.ids import SEGMENTS_MAX, Digest, Epoch, PublishSeq, RunId, SegmentId, Version
from echo2d.core.weights.encoder import RootWriter
from echo2d.core.weights.form import FRAME_BYTES_MAX, RUN_ID_CHARS_MAX, FormFacts
from echo2d.core.weights.signed_index import (
    ROOT_BYTES_MAX,
    ROOT_SEGMENTS_MAX,
    FormTotals,
    Root,
    running_digest,
)
from echo2d.errors import IntegrityFault
from tests.support.encodings import BASE_DIGEST, facts


def digests(count: int) -> list[Digest]:
    return [digest_of(b"table %d" % index) for index in range(count)]


TOTALS = FormTotals(100, 200, digest_of(b"snapshot"))
ROOT = Root(facts(), SegmentId(3), tuple(digests(2)), running_digest(digests(5)), None)


def test_a_root_round_trips() -> None:
    for root in (
        ROOT,
        replace(ROOT, totals=TOTALS),
        replace(ROOT, facts=facts("delta"), segments=()),
    ):
        assert Root.decode(root.signing_bytes()) == root
    assert ROOT.form == facts().form
    assert ROOT.segment_count == 5


def test_the_largest_root_is_within_its_limit_of_bytes() -> None:
    largest_facts = FormFacts(
        RunId("r" * RUN_ID_CHARS_MAX), Epoch(INT_MAX), Version(INT_MAX), PublishSeq(INT_MAX), "delta", BASE_DIGEST,
        FRAME_BYTES_MAX,
    )  # fmt: skip
    first = SegmentId(SEGMENTS_MAX - ROOT_SEGMENTS_MAX)
    totals = FormTotals(INT_MAX, INT_MAX, digest_of(b""))
    largest = Root(largest_facts, first, tuple(digests(ROOT_SEGMENTS_MAX)), digest_of(b""), totals)
    assert len(largest.signing_bytes()) <= ROOT_BYTES_MAX


@pytest.mark.parametrize(
    "change",
    [
        {"segments": tuple(digests(ROOT_SEGMENTS_MAX + 1))},
        {"first_segment": SegmentId(SEGMENTS_MAX - 1)},
        {"segments": (Digest(b"short"),)},
        {"running": Digest(b"short")},
        {"first_segment": SegmentId(0), "segments": ()},
    ],
)
def test_impossible_roots_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(IntegrityFault):
        replace(ROOT, **change)  # type: ignore[arg-type]


def test_impossible_totals_are_refused() -> None:
    with pytest.raises(IntegrityFault):
        FormTotals(1, 1, Digest(b"short"))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        ROOT.signing_bytes()[:-1],
        ROOT.signing_bytes() + b"\0",
        ROOT.signing_bytes().replace(b"root-1", b"root-2"),
    ],
)
def test_damaged_roots_are_refused(data: bytes) -> None:
    with pytest.raises(IntegrityFault):
        Root.decode(data)


def test_roots_name_each_segment_once() -> None:
    writer = RootWriter(facts())
    assert writer.take() == []
    names = digests(20)
    for name in names[:2]:
        writer.add(name)
    roots = writer.take()
    for name in names[2:]:
        writer.add(name)
    roots += writer.take(TOTALS)
    writer.check()
    assert [(root.first_segment, root.segment_count) for root in roots] == [
        (0, 2),
        (2, 18),
        (18, 20),
    ]
    assert [name for root in roots for name in root.segments] == names == list(writer.segments)
    assert [root.running for root in roots] == [
        running_digest(names[:count]) for count in (2, 18, 20)
    ]
    assert [root.totals for root in roots] == [None, None, TOTALS]


def test_totals_alone_make_a_root() -> None:
    writer = RootWriter(facts())
    writer.add(digests(1)[0])
    assert len(writer.take()) == 1
    (last,) = writer.take(TOTALS)
    assert (last.first_segment, last.segments, last.totals) == (1, (), TOTALS)
