"""Finds frames in model directories that are already on this machine, so that no peer has to send them.

The directories are not trusted. A chunk is used only if it has the digest that a signed table names. It is
then encoded again, and its frames are used only if they equal the published ones. A directory may contain
symbolic links, as download caches do, or be a slot that changes.
"""

import logging
import threading
from collections.abc import Collection, Iterator
from pathlib import Path

from echo2d.core.base.canonical import digest_of
from echo2d.core.base.ids import ChunkId, Digest, FrameId, SegmentId
from echo2d.core.weights.form import ChunkRecord, encode_record
from echo2d.core.weights.manifest import Chunk
from echo2d.core.weights.verifier import FormIndex
from echo2d.errors import OperatorFault, StoreFault
from echo2d.store.disk import read_at, store_faults

Found = list[tuple[FrameId, memoryview]]

log = logging.getLogger("echo2d.peer")


class BaseModel:
    """Looks chunks up in the directories, in order. Blocking; safe to use from several threads."""

    def __init__(self, *directories: Path) -> None:
        self._directories = directories
        # The digest of each chunk that was read; None: it could not be read. There are few: at most
        # the chunks of a few versions' layouts.
        self._digests: dict[tuple[Path, Chunk], Digest | None] = {}
        self._lock = threading.Lock()

    @staticmethod
    def at(directory: Path) -> "BaseModel":
        """The base model in this directory. OperatorFault: it is not a directory."""
        if not directory.is_dir():
            raise OperatorFault(
                f"worker.base_model: expected a directory with a model, or its name on the Hugging Face "
                f"hub as --base-model; {directory} is neither"
            )
        return BaseModel(directory)

    def frames(
        self, index: FormIndex, segment: SegmentId, *, missing: Collection[ChunkId]
    ) -> Iterator[Found]:
        """The frames of a segment's missing chunks that are found here, chunk by chunk.

        There are none for a segment whose table is not known.
        """
        table = index.table(segment)
        for record in () if table is None else table.records:
            place = index.chunk(record.chunk) if record.chunk in missing else None
            data = None if place is None else self._chunk(place, record.result)
            found = [] if data is None else _encoded_again(index, record, data)
            if found:
                yield found

    def _chunk(self, place: Chunk, digest: Digest) -> bytes | None:
        """The chunk's bytes from the first directory where they have this digest, or None."""
        found = (self._chunk_of(directory, place, digest) for directory in self._directories)
        return next((data for data in found if data is not None), None)

    def _chunk_of(self, directory: Path, place: Chunk, digest: Digest) -> bytes | None:
        known = directory, place
        with self._lock:
            # If the chunk was read before and had another digest, it is not read again.
            if self._digests.get(known, digest) != digest:
                return None
        data = self._read(directory / place.path, place)
        with self._lock:
            self._digests[known] = None if data is None else digest_of(data)
            return data if self._digests[known] == digest else None

    def _read(self, path: Path, place: Chunk) -> bytes | None:
        try:
            with store_faults("reading", path):
                data = read_at(path.resolve(strict=True), place.length, place.offset)
        except StoreFault as fault:
            log.info("%s", fault)
            return None
        return data if len(data) == place.length else None


def _encoded_again(index: FormIndex, record: ChunkRecord, data: bytes) -> Found:
    """The chunk's frames; none if this encoder gives another record than the publisher's."""
    again, payload = encode_record(record.chunk, data)
    view = memoryview(payload)
    spans = index.chunk_spans(record.chunk) if again == record else ()
    return [
        (span.frame, view[span.offset_in_chunk : span.offset_in_chunk + span.length])
        for span in spans
    ]
