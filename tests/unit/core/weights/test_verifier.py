"""What a receiver believes: true and false roots, pages and tables, in and out of order."""

from dataclasses import replace

import pytest

from echo2d.core.base.canonical import digest_of
from echo2d.core.base.ids import ChunkId, Digest, SegmentId, frame_id
from echo2d.core.weights.delta import ChunkMode
from echo2d.core.weights.form import NO_BASE, ChunkRecord, SegmentTable
from echo2d.core.weights.manifest import Chunk, FileEntry
from echo2d.core.weights.signed_index import PAGE_SEGMENTS_MAX, FormTotals, Root, running_digest
from echo2d.core.weights.verifier import FormIndex
from echo2d.errors import IntegrityFault
from tests.support.encodings import BuiltForm, build_form, facts

CONTENTS = {f"{index:02d}.txt": bytes(range(256)) * 40 for index in range(6)}
FORM = build_form(
    facts(), CONTENTS, segment_bytes=6000
)  # a chunk takes about 5.2 kB: one segment each
LAST = FORM.roots[-1]


def complete(index: FormIndex, form: BuiltForm = FORM) -> None:
    for segment in form.segments:
        index.accept_table(segment.table.segment, segment.table.encode())
        index.check()


def test_the_fixture_has_a_segment_per_file() -> None:
    assert len(FORM.segments) == len(FORM.roots) == 6


def test_roots_and_tables_in_order_complete_the_index() -> None:
    index = FormIndex(FORM.roots[0])
    for root, segment in zip(FORM.roots, FORM.segments, strict=True):
        index.accept_root(root)
        index.check()
        number = segment.table.segment
        assert index.missing_segment() is None
        assert index.spans(number) == ()
        assert index.table_digest(number) == segment.table.digest
        assert index.length(frame_id(number, 0)) is None
        index.accept_table(number, segment.table.encode())
        index.check()
        assert index.length(frame_id(number, 0)) == len(segment.table.encode())
        assert index.spans(number) == tuple(
            span for span, _ in segment.frames(FORM.facts.frame_bytes)
        )
        for span, payload in segment.frames(FORM.facts.frame_bytes):
            assert index.span(span.frame) == span
            assert (span.digest, index.length(span.frame)) == (digest_of(payload), len(payload))
    assert index.complete
    assert index.manifest() == FORM.manifest


def test_a_newcomer_completes_the_list_with_pages() -> None:
    index = FormIndex(LAST)
    assert index.missing_segment() == 0
    index.accept_page(SegmentId(0), FORM.digests[:2])
    index.check()
    assert index.missing_segment() == 2
    assert index.table_digest(SegmentId(0)) is None, "claimed, not proven"
    index.accept_page(SegmentId(2), FORM.digests[2:])
    index.check()
    assert index.missing_segment() is None
    complete(index)
    assert index.manifest() == FORM.manifest


def test_a_false_page_is_dropped_and_a_true_one_works_afterwards() -> None:
    index = FormIndex(LAST)
    index.accept_page(SegmentId(1), [digest_of(b"lie")])
    index.accept_page(SegmentId(0), FORM.digests[:1])
    with pytest.raises(IntegrityFault, match="running"):
        index.accept_page(SegmentId(2), FORM.digests[2:])
    index.check()
    assert index.missing_segment() == 0
    index.accept_page(SegmentId(0), FORM.digests)
    assert index.missing_segment() is None


def test_a_root_is_accepted_even_if_it_shows_that_a_page_was_false() -> None:
    index = FormIndex(FORM.roots[3])
    index.accept_page(SegmentId(0), [FORM.digests[0], digest_of(b"lie")])
    index.accept_root(FORM.roots[2])
    index.check()
    assert index.missing_segment() == 0
    index.accept_page(SegmentId(0), FORM.digests)
    assert index.missing_segment() is None


def test_a_page_may_not_contradict_a_signed_digest_nor_be_endless() -> None:
    index = FormIndex(FORM.roots[2])
    with pytest.raises(IntegrityFault, match="contradicts"):
        index.accept_page(SegmentId(2), [digest_of(b"lie")])
    with pytest.raises(IntegrityFault, match="too long"):
        index.accept_page(SegmentId(0), [digest_of(b"")] * (PAGE_SEGMENTS_MAX + 1))
    index.accept_page(SegmentId(0), FORM.digests)
    assert index.table_digest(SegmentId(3)) is None, (
        "what is beyond the newest root is not believed"
    )
    index.check()


def test_roots_may_be_skipped_repeated_and_late() -> None:
    index = FormIndex(FORM.roots[3])
    for position in (3, 5, 0, 5, 1, 2, 4):
        index.accept_root(FORM.roots[position])
        index.check()
    assert index.missing_segment() is None
    assert index.totals == LAST.totals


def other(root: Root, *, running: Digest | None = None) -> Root:
    lies = tuple(digest_of(b"lie") for _ in root.segments)
    return replace(root, segments=lies, running=root.running if running is None else running)


@pytest.mark.parametrize(
    "contradiction",
    [
        replace(FORM.roots[1], facts=facts(version=8)),
        replace(FORM.roots[1], facts=replace(facts(), frame_bytes=1 << 20)),
        other(FORM.roots[0]),
        replace(FORM.roots[1], running=digest_of(b"lie")),
        other(
            FORM.roots[2], running=running_digest([*FORM.digests[:2], digest_of(b"another lie")])
        ),
    ],
)
def test_contradicting_roots_change_nothing(contradiction: Root) -> None:
    index = FormIndex(FORM.roots[0])
    index.accept_root(FORM.roots[1])
    with pytest.raises(IntegrityFault):
        index.accept_root(contradiction)
    index.check()
    assert index.segment_count == 2
    assert index.missing_segment() is None


def test_nothing_follows_the_last_root() -> None:
    index = FormIndex(FORM.roots[0])
    for root in FORM.roots[1:]:
        index.accept_root(root)
    more = [*FORM.digests, digest_of(b"one more")]
    longer = Root(FORM.facts, SegmentId(6), (more[6],), running_digest(more), None)
    with pytest.raises(IntegrityFault, match="after"):
        index.accept_root(longer)
    with pytest.raises(IntegrityFault, match="after"):
        index.accept_root(replace(LAST, totals=FormTotals(1, 1, digest_of(b""))))
    assert index.totals == LAST.totals


def test_a_last_root_may_not_be_short() -> None:
    index = FormIndex(FORM.roots[3])
    with pytest.raises(IntegrityFault, match="after"):
        index.accept_root(replace(FORM.roots[1], totals=LAST.totals))


def test_tables_are_accepted_in_any_order() -> None:
    index = FormIndex(LAST)
    index.accept_page(SegmentId(0), FORM.digests)
    for position in (4, 2, 5, 0, 1, 3):
        assert not index.complete
        index.accept_table(SegmentId(position), FORM.segments[position].table.encode())
        index.check()
    assert index.complete
    assert index.manifest().digest == FORM.manifest.digest


def test_the_index_says_where_each_chunk_belongs() -> None:
    index = FormIndex(LAST)
    index.accept_page(SegmentId(0), FORM.digests)
    assert (index.files, index.chunk(ChunkId(0))) == ((), None)
    assert (
        index.chunk_spans(ChunkId(0)),
        index.spans(SegmentId(9)),
        index.table(SegmentId(0)),
    ) == ((), (), None)
    complete(index)
    assert index.files == FORM.manifest.files
    assert index.chunk(ChunkId(2)) == Chunk("02.txt", 0, 10_240)
    assert index.chunk(ChunkId(6)) is None
    table = index.table(SegmentId(2))
    assert table is not None
    [record] = table.records
    assert (record.chunk, record.result) == (2, digest_of(CONTENTS["02.txt"]))
    assert [span.chunk for span in index.chunk_spans(ChunkId(2))] == [2]
    assert index.span(frame_id(SegmentId(0), 0)) is None
    unknown = frame_id(SegmentId(0), 9)
    assert (index.span(unknown), index.length(unknown)) == (None, None)


def test_a_damaged_or_unsigned_table_is_refused() -> None:
    index = FormIndex(FORM.roots[0])
    data = FORM.segments[0].table.encode()
    for segment, wrong in ((0, data[:-1]), (0, data + b"\0"), (1, FORM.segments[1].table.encode())):
        with pytest.raises(IntegrityFault, match="wrong digest"):
            index.accept_table(SegmentId(segment), wrong)
    index.accept_table(SegmentId(0), data)


# --- a sender that signs nonsense

FILES = (FileEntry("a.json", 100, 0), FileEntry("b.json", 50, 0))


def record(chunk: int, wire_bytes: int, mode: ChunkMode = ChunkMode.RAW) -> ChunkRecord:
    return ChunkRecord(ChunkId(chunk), mode, wire_bytes, NO_BASE, digest_of(b""))


def table(segment: int, *records: ChunkRecord) -> SegmentTable:
    frames = tuple(digest_of(b"") for each in records if each.wire_bytes)
    return SegmentTable(SegmentId(segment), records, frames, FILES if segment == 0 else ())


@pytest.mark.parametrize(
    "tables",
    [
        [table(0, record(1, 50))],
        [table(0, record(0, 99))],
        [table(0, record(0, 100), record(1, 50, ChunkMode.FULL))],
        [table(0, record(0, 0, ChunkMode.SAME))],
        [table(0, record(0, 100), record(1, 50), record(2, 1))],
        [table(0, record(0, 100)), table(1, record(2, 50))],
        [table(0, record(0, 100)), table(1, record(0, 50))],
        [table(0, record(0, 100)), table(1, record(1, 49))],
        [table(1, record(0, 50)), table(0, record(0, 100))],
        [table(1, record(1, 49)), table(0, record(0, 100))],
        [replace(table(0, record(0, 100)), frames=())],
    ],
)
def test_impossible_tables_are_refused_even_if_signed(tables: list[SegmentTable]) -> None:
    ordered = sorted(tables, key=lambda each: each.segment)
    digests = tuple(each.digest for each in ordered)
    index = FormIndex(Root(facts(), SegmentId(0), digests, running_digest(digests), None))
    for each in tables[:-1]:
        index.accept_table(each.segment, each.encode())
    with pytest.raises(IntegrityFault):
        index.accept_table(tables[-1].segment, tables[-1].encode())
    index.check()


def test_a_table_of_another_segment_is_refused() -> None:
    wrong = table(1, record(1, 50))
    index = FormIndex(
        Root(facts(), SegmentId(0), (wrong.digest,), running_digest([wrong.digest]), None)
    )
    with pytest.raises(IntegrityFault, match="another segment"):
        index.accept_table(SegmentId(0), wrong.encode())


@pytest.mark.parametrize(
    "change", [{"wire_bytes": 1}, {"full_bytes": 1}, {"snapshot": digest_of(b"other")}]
)
def test_totals_that_do_not_add_up_are_refused(change: dict[str, object]) -> None:
    assert LAST.totals is not None
    index = FormIndex(replace(LAST, totals=replace(LAST.totals, **change)))  # type: ignore[arg-type]
    index.accept_page(SegmentId(0), FORM.digests)
    complete(index)
    with pytest.raises(IntegrityFault, match="add up"):
        index.manifest()


def test_a_form_with_too_few_chunks_gives_no_manifest() -> None:
    short = table(0, record(0, 100))
    totals = FormTotals(100, 100, digest_of(b""))
    index = FormIndex(
        Root(facts(), SegmentId(0), (short.digest,), running_digest([short.digest]), totals)
    )
    index.accept_table(SegmentId(0), short.encode())
    with pytest.raises(IntegrityFault):
        index.manifest()
