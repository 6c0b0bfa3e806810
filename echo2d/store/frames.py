"""Store the verified frames of the last few forms on disk, for relaying, for decoding and for
restarts.

    root / <form id> / facts          the form's FormFacts
                     / 0000.table     the segment's table as it arrived
                     / 0000.frames    frames at their offset_in_segment; gaps are sparse or stale
         / spare / 0                  files of forgotten forms, reused for the next segments because
                                      overwriting is cheaper than allocating blocks

No journal says which frames are held; digests decide. A frame is hashed when it is written, when
it is read for relaying, and by `recover` after a restart, so stale bytes of an earlier form are
never used. A frame that is read for decoding is not hashed again, because the decoded chunk is hashed. Tables are *not*
verified here: after a restart the caller checks them against the signed digests
(`FormIndex.accept_table`).

Blocking functions, safe to call from several threads, except that no two threads may write the same
frame, and a form must not be used while it is being forgotten.
"""

import contextlib
import os
import re
import shutil
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count, groupby
from pathlib import Path

from echo2d.core.base.canonical import Buffer, digest_of
from echo2d.core.base.ids import (
    FORM_ID_CHARS,
    FormId,
    FrameId,
    SegmentId,
    frame_id,
    is_table,
    segment_of,
)
from echo2d.core.weights.form import FormFacts, FrameSpan, SegmentTable, frame_layout
from echo2d.errors import IntegrityFault, StoreFault
from echo2d.store.budget import DiskBudget
from echo2d.store.disk import (
    allocate,
    opened,
    read_at,
    read_file,
    replace_file,
    store_faults,
    write_all,
)

SPARES_MAX = 64  # files of at most a segment each, so 4 GiB together

_OWNER = "frames"  # name in the disk budget
_FORM_ID = re.compile(rf"[0-9a-f]{{{FORM_ID_CHARS}}}")


class FramesDamaged(IntegrityFault):
    """Frames have changed on disk since they were stored; the store no longer holds them."""

    def __init__(self, form: FormId, frames: Sequence[FrameId]) -> None:
        super().__init__(f"frame {frames[0]} of form {form} is damaged on disk")
        self.form, self.frames = form, tuple(frames)


@dataclass(slots=True)
class _StoredForm:
    """One form's folder."""

    facts: FormFacts
    directory: Path
    # Bytes of each segment, including its table.
    reserved: dict[SegmentId, int] = field(default_factory=dict)
    held: set[FrameId] = field(default_factory=set)

    def table(self, segment: SegmentId) -> Path:
        return self.directory / f"{segment:04d}.table"

    def frames(self, segment: SegmentId) -> Path:
        return self.directory / f"{segment:04d}.frames"


class FrameStore:
    """The frames of several forms in `root`. A segment's bytes are claimed from the budget when its
    table is stored.

    Spare files count as used. When the disk or the budget is full, the caller should call
    `free_spares` and try again.
    """

    def __init__(self, root: Path, budget: DiskBudget) -> None:
        self._root = root
        self._budget = budget
        self._lock = threading.Lock()  # guards the bookkeeping, not the files
        self._forms: dict[FormId, _StoredForm] = {}
        self._spare = root / "spare"
        self._spares: dict[Path, int] = {}  # sizes in bytes
        self._spare_names = count()
        # How often the deletion of spare files freed space. A caller that found the disk full tries again when
        # this number changes.
        self.freed = 0
        shutil.rmtree(self._spare, ignore_errors=True)
        with store_faults("opening the frame store", root):
            root.mkdir(parents=True, exist_ok=True)
            for directory in root.iterdir():
                if _FORM_ID.fullmatch(directory.name):
                    self._load(directory)
        budget.note(_OWNER, self.used_bytes)

    # --- forms

    def forms(self) -> tuple[FormFacts, ...]:
        """The facts of all forms in the store, oldest publish first."""
        return tuple(
            sorted(
                (form.facts for form in self._forms.values()), key=lambda facts: facts.publish_seq
            )
        )

    def begin(self, facts: FormFacts) -> None:
        """Add a form, unless it is there already."""
        directory = self._root / facts.form
        with store_faults("beginning a form in", directory):
            if facts.form in self._forms and directory.exists():
                return
            directory.mkdir(exist_ok=True)
            replace_file(directory / "facts", facts.encode(), durable=False)
        self._forms[facts.form] = _StoredForm(facts, directory)

    def forget(self, form: FormId) -> None:
        """Delete a form; some of its files become spare files. Unknown forms are ignored."""
        stored = self._forms.get(form)
        if stored is None:
            return
        try:
            with store_faults("deleting", stored.directory):
                # A file that cannot become a spare is deleted with the folder.
                with contextlib.suppress(OSError):
                    self._keep_spares(stored)
                shutil.rmtree(stored.directory)
        finally:
            with self._lock:
                del self._forms[form]
                self._budget.note(_OWNER, self.used_bytes)

    def free_spares(self) -> None:
        """Delete the spare files."""
        with self._lock:
            self.freed += bool(self._spares)
            self._spares.clear()
            shutil.rmtree(self._spare, ignore_errors=True)
            self._budget.note(_OWNER, self.used_bytes)

    @property
    def used_bytes(self) -> int:
        """The bytes of all segments, counted as if complete, and of the spare files."""
        segments = (size for form in list(self._forms.values()) for size in form.reserved.values())
        return sum(segments) + sum(self._spares.values())

    # --- tables and frames

    def put_table(self, form: FormId, segment: SegmentId, data: bytes) -> None:
        """Store a table that the caller has verified, and reserve space for its frames.

        If it differs from the stored table, it replaces that one, and the segment's frames are no
        longer held.
        """
        stored = self._stored(form)
        # A fault means that the table is not held, or can no longer be read; then it is stored again.
        with contextlib.suppress(StoreFault):
            if self.get_table(form, segment) == data:
                return
        table, frames = SegmentTable.decode(data), stored.frames(segment)
        with store_faults("storing a table in", stored.directory):
            with self._lock:
                spare = None if frames.exists() else self._spare_for(table.wire_bytes)
                freed = stored.reserved.get(segment, 0) + (self._spares[spare] if spare else 0)
                wanted = len(data) + table.wire_bytes
                self._budget.claim(_OWNER, self.used_bytes - freed + wanted)
                stored.reserved[segment] = wanted
                _drop_segment(stored, segment)
                if spare and self._spares.pop(spare) > table.wire_bytes:
                    with contextlib.suppress(FileNotFoundError):
                        os.truncate(spare, table.wire_bytes)
                    self.freed += 1
            replace_file(stored.table(segment), data, durable=False)
            if spare:
                # `free_spares` may have deleted it meanwhile.
                with contextlib.suppress(FileNotFoundError):
                    spare.replace(frames)
            allocate(frames, table.wire_bytes, sparse=True)
        stored.held.add(frame_id(segment, 0))

    def get_table(self, form: FormId, segment: SegmentId) -> bytes:
        """Read a table's bytes as they are on disk; the caller knows their digest."""
        stored = self._stored(form)
        self._require_held(stored, frame_id(segment, 0))
        with store_faults("reading", stored.table(segment)):
            return read_file(stored.table(segment))

    def put_verified(self, form: FormId, frames: Iterable[tuple[FrameSpan, Buffer]]) -> None:
        """Store frames that the caller has verified, of segments whose tables are stored."""
        stored = self._stored(form)
        for segment, together in groupby(frames, key=lambda each: segment_of(each[0].frame)):
            self._require_held(stored, frame_id(segment, 0))
            path = stored.frames(segment)
            with (
                store_faults("storing frames in", path),
                opened(path, os.O_WRONLY | os.O_CREAT) as fd,
            ):
                for span, payload in together:
                    write_all(fd, payload, span.offset_in_segment)
                    stored.held.add(span.frame)

    def get_frame(self, form: FormId, span: FrameSpan) -> bytes:
        """Read and verify a held frame. FramesDamaged: it has changed, and is no longer held."""
        return self.verify(form, (span,))

    def read_encoded_chunk(self, form: FormId, spans: Sequence[FrameSpan]) -> bytes:
        """Read the payload of one encoded chunk, or any adjacent frames of a segment, without
        verifying it.

        For callers that hash the decoded chunk, and call `verify` to find the damaged frames if the hash is
        wrong.
        """
        if not spans:
            return b""
        stored = self._stored(form)
        for span in spans:
            self._require_held(stored, span.frame)
        first, last = spans[0], spans[-1]
        path = stored.frames(segment_of(first.frame))
        length = last.offset_in_segment + last.length - first.offset_in_segment
        with store_faults("reading", path):
            return read_at(path, length, first.offset_in_segment) if path.exists() else b""

    def verify(self, form: FormId, spans: Sequence[FrameSpan]) -> bytes:
        """Read adjacent frames and hash each. FramesDamaged names those that have changed; they are
        no longer held.
        """
        stored, data = self._stored(form), self.read_encoded_chunk(form, spans)
        damaged = [
            span.frame for span in spans if not _intact(data, span, spans[0].offset_in_segment)
        ]
        if damaged:
            stored.held.difference_update(damaged)
            raise FramesDamaged(form, damaged)
        return data

    def held(self, form: FormId) -> frozenset[FrameId]:
        """The tables (index 0) and frames on disk; after a restart none until `recover` runs."""
        return frozenset(self._stored(form).held)

    def recover(self, form: FormId) -> frozenset[FrameId]:
        """Find out which tables and frames of a form are on disk, by reading and hashing the whole
        form.
        """
        stored = self._stored(form)
        for segment in list(stored.reserved):
            _drop_segment(stored, segment)
            # If the table is damaged, the segment is fetched again.
            with contextlib.suppress(IntegrityFault):
                self._recover_segment(stored, segment)
        return self.held(form)

    def check(self) -> None:
        """Assert all invariants of the bookkeeping."""
        for stored in self._forms.values():
            tables = {segment_of(frame) for frame in stored.held if is_table(frame)}
            assert tables <= stored.reserved.keys()
            assert {segment_of(frame) for frame in stored.held} == tables
        assert len(self._spares) <= SPARES_MAX
        assert {path: path.stat().st_size for path in self._spares} == self._spares

    # --- inside

    def _load(self, directory: Path) -> None:
        """Register a form's folder found at start. A folder without valid facts is deleted."""
        facts = _read_facts(directory)
        if facts is None or facts.form != directory.name:
            shutil.rmtree(directory)
            return
        stored = _StoredForm(facts, directory)
        for table in directory.glob("[0-9][0-9][0-9][0-9].table"):
            segment = SegmentId(int(table.stem))
            frames = stored.frames(segment)
            stored.reserved[segment] = table.stat().st_size + (
                frames.stat().st_size if frames.exists() else 0
            )
        self._forms[facts.form] = stored

    def _keep_spares(self, stored: _StoredForm) -> None:
        """Make spare files of the form's files, within SPARES_MAX and the budget."""
        self._spare.mkdir(exist_ok=True)
        for segment in stored.reserved:
            if len(self._spares) >= SPARES_MAX or self._budget.exceeded:
                return
            frames, spare = stored.frames(segment), self._spare / str(next(self._spare_names))
            size = frames.stat().st_size
            frames.replace(spare)
            with self._lock:
                stored.reserved[segment] -= size
                self._spares[spare] = size

    def _spare_for(self, wire_bytes: int) -> Path | None:
        """The spare file closest in size to `wire_bytes`; one that is large enough is preferred.
        None: there is none.
        """
        sizes = self._spares
        return min(
            sizes,
            key=lambda each: (sizes[each] < wire_bytes, abs(sizes[each] - wire_bytes)),
            default=None,
        )

    def _recover_segment(self, stored: _StoredForm, segment: SegmentId) -> None:
        with store_faults("reading", stored.directory):
            table = SegmentTable.decode(read_file(stored.table(segment)))
            spans = frame_layout(table, stored.facts.frame_bytes)
            if table.segment != segment:
                raise IntegrityFault("a table is another segment's")
            allocate(stored.frames(segment), table.wire_bytes, sparse=True)
            stored.held.add(frame_id(segment, 0))
            for span in spans:
                data = read_at(stored.frames(segment), span.length, span.offset_in_segment)
                if _intact(data, span, span.offset_in_segment):
                    stored.held.add(span.frame)

    def _stored(self, form: FormId) -> _StoredForm:
        stored = self._forms.get(form)
        if stored is None:
            raise StoreFault(f"form {form[:FORM_ID_CHARS]!r} is not in the frame store")
        return stored

    def _require_held(self, stored: _StoredForm, frame: FrameId) -> None:
        if frame not in stored.held:
            raise StoreFault(f"frame {frame} of form {stored.facts.form} is not in the frame store")


def _read_facts(directory: Path) -> FormFacts | None:
    """The facts in a form's folder; None if they are missing or damaged."""
    try:
        return FormFacts.decode(read_file(directory / "facts"))
    except (FileNotFoundError, IntegrityFault):
        return None


def _drop_segment(stored: _StoredForm, segment: SegmentId) -> None:
    stored.held.difference_update(
        [frame for frame in frozenset(stored.held) if segment_of(frame) == segment]
    )


def _intact(data: bytes, span: FrameSpan, start: int) -> bool:
    """Whether `data`, which begins at `start` in the segment, holds the frame that `span` names."""
    offset = span.offset_in_segment - start
    return digest_of(memoryview(data)[offset : offset + span.length]) == span.digest
