"""Keep the newest encoded deltas on disk, to compose deltas for workers that are several versions
behind. None of their chunks is split (`core.weights.delta`), because split chunks cannot be composed.

    root / frames/<form id>/...   a frame store
         / <form id>              digests of the form's segment tables; written last, so a form
                                  without this file is unfinished and is deleted

These digests verify the tables, and the tables verify the frames. At most DELTAS_KEPT_MAX deltas
and `bytes_max` bytes are kept; the oldest are evicted. A delta takes about half a percent of its
version. Blocking functions, safe to call from several threads.
"""

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

from echo2d.core.base.canonical import require
from echo2d.core.base.ids import Digest, FormId, SegmentId
from echo2d.core.weights.encoder import Segment
from echo2d.core.weights.form import (
    ChunkRecord,
    FormFacts,
    FrameSpan,
    SegmentTable,
    frame_layout,
)
from echo2d.core.weights.kept_deltas import DELTAS_KEPT_MAX, KeptDelta
from echo2d.core.weights.manifest import Chunk, Manifest, chunk_layout, split_digests
from echo2d.errors import IntegrityFault, StoreFault
from echo2d.store.budget import DiskBudget
from echo2d.store.disk import read_file, replace_file, store_faults
from echo2d.store.frames import FrameStore

log = logging.getLogger("echo2d.store")


class StoredDelta:
    """One kept delta, opened for reading. IntegrityFault: its tables are damaged."""

    def __init__(self, store: FrameStore, facts: FormFacts, tables: Sequence[SegmentTable]) -> None:
        self._store, self._form = store, facts.form
        layout = chunk_layout(tables[0].files)
        self._chunks: dict[Chunk, tuple[ChunkRecord, list[FrameSpan]]] = {}
        for table in tables:
            spans = frame_layout(table, facts.frame_bytes)
            for record in table.records:
                self._chunks[layout[record.chunk]] = (
                    record,
                    [span for span in spans if span.chunk == record.chunk],
                )

    def read(self, place: Chunk) -> tuple[ChunkRecord, bytes] | None:
        """Return the chunk's record and payload, or None if the delta has no such chunk.

        IntegrityFault, StoreFault: the payload is damaged or cannot be read.
        """
        record, spans = self._chunks.get(place, (None, []))
        return None if record is None else (record, self._store.verify(self._form, spans))


class DeltaStore:
    """See the module docstring."""

    def __init__(self, root: Path, bytes_max: int) -> None:
        self._root = root
        self._kept: dict[FormId, KeptDelta] = {}  # the oldest first
        self._lock = threading.Lock()
        with store_faults("opening the kept deltas", root):
            root.mkdir(parents=True, exist_ok=True)
        self._store = FrameStore(root / "frames", DiskBudget(bytes_max))
        for facts in self._store.forms():
            self._find(facts)

    def kept(self) -> tuple[KeptDelta, ...]:
        return tuple(self._kept.values())

    def put(self, facts: FormFacts, segment: Segment) -> None:
        """Store a segment of the delta that is being encoded. Unfinished segments of any other
        delta are deleted.

        StoreFault: there is no room even without the older deltas, and this one is not kept.
        """
        with self._lock:
            for other in self._store.forms():
                if other.form not in self._kept and other.form != facts.form:
                    self._drop(other.form)
            while not self._put(facts, segment):
                self._drop(next(iter(self._kept)))

    def finish(
        self, facts: FormFacts, digests: Sequence[Digest], manifest: Manifest, wire_bytes: int
    ) -> None:
        """Keep the delta, whose segments have all been stored. digests: of their tables. StoreFault: it
        is not kept.
        """
        with self._lock, store_faults("keeping a delta in", self._root):
            if facts.base_digest is not None and facts.base_digest != manifest.digest:
                replace_file(self._root / facts.form, b"".join(digests), durable=False)
                self._keep(facts, manifest.digest, wire_bytes)

    def open(self, base: Digest, made: Digest) -> StoredDelta:
        """Open the delta between two snapshots. IntegrityFault, StoreFault: it is not kept any
        more, or is damaged.
        """
        with self._lock:
            found = [
                form for form, kept in self._kept.items() if (kept.base, kept.made) == (base, made)
            ]
            require(bool(found), "a delta needed for composing is not kept any more")
            facts = next(facts for facts in self._store.forms() if facts.form == found[0])
            return StoredDelta(self._store, facts, self._tables(facts))

    # --- inside

    def _put(self, facts: FormFacts, segment: Segment) -> bool:
        """Whether the segment was stored. False: the disk is full, but evicting the oldest delta
        may help.
        """
        try:
            self._store.begin(facts)
            self._store.put_table(facts.form, segment.table.segment, segment.table.encode())
            self._store.put_verified(facts.form, segment.frames(facts.frame_bytes))
        except StoreFault as fault:
            if fault.full and self._kept:
                return False
            self._drop(facts.form)
            raise
        return True

    def _keep(self, facts: FormFacts, made: Digest, wire_bytes: int) -> None:
        assert facts.base_digest is not None
        self._kept.pop(facts.form, None)
        self._kept[facts.form] = KeptDelta(facts.base_digest, made, wire_bytes)
        while len(self._kept) > DELTAS_KEPT_MAX:
            self._drop(next(iter(self._kept)))

    def _drop(self, form: FormId) -> None:
        self._kept.pop(form, None)
        try:
            with store_faults("deleting a delta in", self._root):
                (self._root / form).unlink(missing_ok=True)
            self._store.forget(form)
            self._store.free_spares()
        except StoreFault as fault:
            log.warning("%s", fault)

    def _find(self, facts: FormFacts) -> None:
        """Recover a delta of an earlier process, or delete it if that process did not finish it."""
        try:
            self._store.recover(facts.form)
            tables = self._tables(facts)
            manifest = Manifest(
                tables[0].files,
                tuple(record.result for table in tables for record in table.records),
            )
            self._keep(
                facts,
                manifest.digest,
                sum(table.wire_bytes + len(table.encode()) for table in tables),
            )
        except (IntegrityFault, StoreFault) as fault:
            log.info("delta not kept form=%s reason=%s", facts.form, fault)
            self._drop(facts.form)

    def _tables(self, facts: FormFacts) -> list[SegmentTable]:
        path = self._root / facts.form
        with store_faults("reading", path):
            digests = split_digests(read_file(path))
        require(bool(digests), "the delta has no segments")
        tables = [
            SegmentTable.decode(self._store.get_table(facts.form, SegmentId(each)))
            for each in range(len(digests))
        ]
        require(
            [table.digest for table in tables] == list(digests), "the delta's tables are damaged"
        )
        return tables

    def check(self) -> None:
        self._store.check()
        assert len(self._kept) <= DELTAS_KEPT_MAX
        assert self._kept.keys() <= {facts.form for facts in self._store.forms()}
