"""One snapshot directory becomes the segments of one form. Blocking: call it in a thread; it uses a few of its own."""

from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from os import cpu_count
from pathlib import Path

from echo2d.core.form_builder import FormBuilder, Segment
from echo2d.core.forms import SEGMENT_BYTES_MAX, ChunkRecord, FormFacts, encode_record
from echo2d.core.ids import ChunkId
from echo2d.core.manifest import Chunk, FileEntry, chunk_layout
from echo2d.core.roots import Totals
from echo2d.store.snapshots import read_chunk, scan_snapshot

ENCODERS_MAX = 4  # chunks encoded at once: about a core and 50 MB each


class Encoder:
    """`directory`: the snapshot; `base`: that of the base, for delta forms. OperatorFault: one of them is none."""

    def __init__(
        self, facts: FormFacts, directory: Path, base: Path | None, *, segment_bytes: int = SEGMENT_BYTES_MAX
    ) -> None:
        self._directory, self._base = directory, base
        self._files: tuple[FileEntry, ...] = scan_snapshot(directory)
        self._in_base = frozenset(chunk_layout(scan_snapshot(base))) if base is not None else frozenset[Chunk]()
        self._builder = FormBuilder(facts, self._files, segment_bytes=segment_bytes)

    def segments(self) -> Generator[Segment, None, None]:
        """All of them, in order. IntegrityFault, StoreFault: a file cannot be read any more."""
        with ThreadPoolExecutor(min(ENCODERS_MAX, cpu_count() or 1), "echo2d-encoder") as pool:
            for record, payload in self._chunks(pool):
                full = self._builder.add(record, payload)
                if full is not None:
                    yield full
        yield self._builder.finish()

    def totals(self) -> Totals:
        """After the last segment."""
        return self._builder.totals()

    def _chunks(self, pool: ThreadPoolExecutor) -> Iterator[tuple[ChunkRecord, bytes]]:
        encoding: deque[Future[tuple[ChunkRecord, bytes]]] = deque()
        for position, chunk in enumerate(chunk_layout(self._files)):
            encoding.append(pool.submit(self._encode, ChunkId(position), chunk))
            if len(encoding) > ENCODERS_MAX:
                yield encoding.popleft().result()
        while encoding:
            yield encoding.popleft().result()

    def _encode(self, position: ChunkId, chunk: Chunk) -> tuple[ChunkRecord, bytes]:
        base = read_chunk(self._base, chunk) if self._base is not None and chunk in self._in_base else None
        return encode_record(position, read_chunk(self._directory, chunk), base)
