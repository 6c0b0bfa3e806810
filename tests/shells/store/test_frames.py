"""Frames on disk: verified when written and read, found again after a restart, bounded."""

import errno
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from echo2d.core.base.ids import FormId, SegmentId, frame_id
from echo2d.core.weights.encoder import Segment
from echo2d.core.weights.form import FrameSpan
from echo2d.errors import IntegrityFault, StoreFault
from echo2d.store import frames as frames_module
from echo2d.store.budget import DiskBudget
from echo2d.store.disk import write_at
from echo2d.store.frames import FrameStore
from tests.support.encodings import BuiltForm, build_form, facts

NOISE = random.Random(3).randbytes(150_000)
CONTENTS = {"a.json": NOISE, "b.json": NOISE[::-1], "c.txt": b"hello"}
FORM = build_form(facts(), CONTENTS, segment_bytes=200_000)
ROOM = 1 << 20


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FrameStore]:
    made = FrameStore(tmp_path / "frames", DiskBudget(ROOM))
    yield made
    made.check()


def put(store: FrameStore, form: BuiltForm) -> None:
    store.begin(form.facts)
    for segment in form.segments:
        store.put_table(form.facts.form, segment.table.segment, segment.table.encode())
        for span, payload in segment.frames(form.facts.frame_bytes):
            store.put_verified(form.facts.form, [(span, payload)])
        store.check()


def spans(segment: Segment) -> list[FrameSpan]:
    return [span for span, _ in segment.frames(FORM.facts.frame_bytes)]


def folder(tmp_path: Path) -> Path:
    return tmp_path / "frames" / FORM.facts.form


def test_a_stored_frame_can_be_read(store: FrameStore) -> None:
    put(store, FORM)
    held = set()
    for segment in FORM.segments:
        assert store.get_table(FORM.facts.form, segment.table.segment) == segment.table.encode()
        held.add(frame_id(segment.table.segment, 0))
        for span, payload in segment.frames(FORM.facts.frame_bytes):
            assert store.get_frame(FORM.facts.form, span) == payload
            held.add(span.frame)
    assert store.held(FORM.facts.form) == held
    assert len(FORM.segments) == 2
    assert store.forms() == (FORM.facts,)


def test_an_encoded_chunk_equals_its_joined_frames(store: FrameStore) -> None:
    put(store, FORM)
    for segment in FORM.segments:
        for record, payload in zip(segment.table.records, segment.payloads, strict=True):
            of_chunk = [span for span in spans(segment) if span.chunk == record.chunk]
            assert store.read_encoded_chunk(FORM.facts.form, of_chunk) == payload
            assert store.verify(FORM.facts.form, of_chunk) == payload
    assert store.verify(FORM.facts.form, ()) == b""


def test_a_damaged_table_is_refused(store: FrameStore) -> None:
    store.begin(FORM.facts)
    with pytest.raises(IntegrityFault):
        store.put_table(FORM.facts.form, SegmentId(0), FORM.segments[0].table.encode()[:-1])
    assert store.held(FORM.facts.form) == frozenset()


def test_unknown_forms_and_frames_before_their_table_are_refused(store: FrameStore) -> None:
    span, payload = next(FORM.segments[0].frames(FORM.facts.frame_bytes))
    for unknown in (FORM.facts.form, FormId("../../etc")):
        with pytest.raises(StoreFault):
            store.get_table(unknown, SegmentId(0))
        store.forget(unknown)
    store.begin(FORM.facts)
    with pytest.raises(StoreFault, match="not in the frame store"):
        store.put_verified(FORM.facts.form, [(span, payload)])


def test_a_frame_that_rots_is_no_longer_held(store: FrameStore, tmp_path: Path) -> None:
    put(store, FORM)
    first, second, third = spans(FORM.segments[0])
    write_at(folder(tmp_path) / "0000.frames", b"rot", second.offset_in_segment)
    assert store.get_frame(FORM.facts.form, first)
    with pytest.raises(IntegrityFault, match="damaged"):
        store.verify(FORM.facts.form, [first, second, third])
    assert {first.frame, third.frame} <= store.held(FORM.facts.form)
    assert second.frame not in store.held(FORM.facts.form)


def test_a_restart_finds_stored_frames_by_their_content(store: FrameStore, tmp_path: Path) -> None:
    put(store, FORM)
    before = store.held(FORM.facts.form)
    rotten = spans(FORM.segments[0])[1]
    write_at(folder(tmp_path) / "0000.frames", b"rot", rotten.offset_in_segment)
    again = FrameStore(tmp_path / "frames", DiskBudget(ROOM))
    assert again.forms() == (FORM.facts,)
    assert again.held(FORM.facts.form) == frozenset()
    assert again.recover(FORM.facts.form) == before - {rotten.frame}
    again.check()
    assert again.used_bytes == store.used_bytes


def test_a_restart_in_the_middle_of_a_segment_keeps_its_frames(
    store: FrameStore, tmp_path: Path
) -> None:
    segment = FORM.segments[0]
    store.begin(FORM.facts)
    store.put_table(FORM.facts.form, SegmentId(0), segment.table.encode())
    span, payload = list(segment.frames(FORM.facts.frame_bytes))[1]
    store.put_verified(FORM.facts.form, [(span, payload)])
    again = FrameStore(tmp_path / "frames", DiskBudget(ROOM))
    assert again.recover(FORM.facts.form) == {frame_id(SegmentId(0), 0), span.frame}
    put(again, FORM)
    again.check()
    assert again.held(FORM.facts.form) == FrameStore(tmp_path / "frames", DiskBudget(ROOM)).recover(
        FORM.facts.form
    )


def test_a_restart_drops_damaged_files(store: FrameStore, tmp_path: Path) -> None:
    put(store, FORM)
    (folder(tmp_path) / "0000.table").write_bytes(b"\0")
    (folder(tmp_path) / "0001.frames").unlink()
    (tmp_path / "frames" / "notes.txt").write_text("not a form")
    (tmp_path / "frames" / ("f" * 32)).mkdir()
    again = FrameStore(tmp_path / "frames", DiskBudget(ROOM))
    assert again.recover(FORM.facts.form) == {frame_id(SegmentId(1), 0)}
    again.check()
    assert sorted(path.name for path in (tmp_path / "frames").iterdir()) == [
        FORM.facts.form,
        "notes.txt",
    ]
    put(again, FORM)
    assert again.held(FORM.facts.form) == store.held(FORM.facts.form)


def test_another_table_replaces_the_segment(store: FrameStore) -> None:
    put(store, FORM)
    other = (
        build_form(facts(), {**CONTENTS, "a.json": NOISE[::2] * 2}, segment_bytes=200_000)
        .segments[0]
        .table
    )
    store.put_table(FORM.facts.form, SegmentId(0), other.encode())
    store.check()
    in_first = {frame for frame in store.held(FORM.facts.form) if frame < frame_id(SegmentId(1), 0)}
    assert in_first == {frame_id(SegmentId(0), 0)}


def test_a_forgotten_form_makes_room(tmp_path: Path) -> None:
    forms = [
        build_form(facts(publish_seq=number, version=number), CONTENTS) for number in (1, 2, 3)
    ]
    one, two, three = (form.facts.form for form in forms)
    store = FrameStore(tmp_path / "frames", DiskBudget(2 * 310_000))
    put(store, forms[0])
    put(store, forms[1])
    with pytest.raises(StoreFault, match="disk_bytes_max"):
        put(store, forms[2])
    store.check()
    store.forget(two)
    put(store, forms[2])
    assert [each.form for each in store.forms()] == [one, three]
    assert not (tmp_path / "frames" / two).exists()
    store.check()


def test_a_segment_reuses_the_file_of_a_forgotten_form_but_none_of_its_frames(
    store: FrameStore, tmp_path: Path
) -> None:
    put(store, FORM)
    before = store.used_bytes
    files = {path.stat().st_ino: path.stat().st_size for path in folder(tmp_path).glob("*.frames")}
    store.forget(FORM.facts.form)
    store.check()
    assert store.used_bytes == sum(files.values())
    new = build_form(
        facts(version=8, publish_seq=4),
        {**CONTENTS, "a.json": NOISE[1:] + b"!"},
        segment_bytes=200_000,
    )
    store.begin(new.facts)
    for segment in new.segments:
        store.put_table(new.facts.form, segment.table.segment, segment.table.encode())
        store.check()
    taken = {
        path.stat().st_ino: path.stat().st_size
        for path in (tmp_path / "frames" / new.facts.form).glob("*.frames")
    }
    assert taken == files
    assert store.used_bytes == before
    tables = {frame_id(segment.table.segment, 0) for segment in new.segments}
    for segment in new.segments:
        for span, _ in segment.frames(new.facts.frame_bytes):
            with pytest.raises(StoreFault, match="not in the frame store"):
                store.get_frame(new.facts.form, span)
    assert store.held(new.facts.form) == tables
    stale = FrameStore(tmp_path / "frames", DiskBudget(ROOM)).recover(new.facts.form) - tables
    same = {
        span.frame
        for segment in FORM.segments
        for span, _ in segment.frames(FORM.facts.frame_bytes)
    }
    assert stale < same, "only what is the same in both versions"
    put(store, new)
    for segment in new.segments:
        for span, payload in segment.frames(new.facts.frame_bytes):
            assert store.get_frame(new.facts.form, span) == payload


def test_spare_files_are_bounded_and_end_with_the_process(
    store: FrameStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames_module, "SPARES_MAX", 1)
    put(store, FORM)
    store.forget(FORM.facts.form)
    assert [path.name for path in (tmp_path / "frames").iterdir()] == ["spare"]
    assert (
        store.used_bytes
        == sum(path.stat().st_size for path in (tmp_path / "frames" / "spare").iterdir())
        > 0
    )
    store.check()
    assert FrameStore(tmp_path / "frames", DiskBudget(ROOM)).used_bytes == 0
    assert list((tmp_path / "frames").iterdir()) == []
    store.free_spares()
    freed = store.freed
    store.free_spares()
    assert store.freed == freed > 0


def test_spare_files_are_deleted_if_their_space_is_needed(tmp_path: Path) -> None:
    budget = DiskBudget(400_000)
    store = FrameStore(tmp_path / "frames", budget)
    put(store, FORM)
    store.forget(FORM.facts.form)
    with pytest.raises(StoreFault, match="disk_bytes_max"):
        budget.claim("a slot", 200_000)
    freed = store.freed
    store.free_spares()
    assert store.freed == freed + 1
    budget.claim("a slot", 200_000)
    put(store, build_form(facts(), {"a.json": NOISE}))
    budget.note("a slot", 400_000)
    store.forget(FORM.facts.form)
    assert store.used_bytes == 0, "with more taken than allowed nothing is kept"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_full_disk_loses_no_stored_frame(
    store: FrameStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = FORM.segments[0]
    store.begin(FORM.facts)
    store.put_table(FORM.facts.form, SegmentId(0), segment.table.encode())

    def full(*args: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    (first, payload), (second, more), *_ = segment.frames(FORM.facts.frame_bytes)
    store.put_verified(FORM.facts.form, [(first, payload)])
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(StoreFault, match="No space left on device"):
            store.put_verified(FORM.facts.form, [(second, more)])
        with pytest.raises(StoreFault, match="No space left on device"):
            store.put_table(FORM.facts.form, SegmentId(1), FORM.segments[1].table.encode())
    store.check()
    assert store.held(FORM.facts.form) == {frame_id(SegmentId(0), 0), first.frame}
    put(store, FORM)
