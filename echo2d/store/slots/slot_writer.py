"""Write one version into the spare slot, chunk by chunk, and make the slot current with its commit.

Blocking functions. The methods of a writer may be called from several threads for different chunks.
"""

import threading
import time
from collections.abc import Sequence
from pathlib import Path

from echo2d.core.base.canonical import Buffer, digest_of
from echo2d.core.base.ids import ChunkId, Digest, Epoch, Version
from echo2d.core.weights.manifest import FileEntry, Manifest, chunk_layout
from echo2d.errors import IntegrityFault, StoreFault
from echo2d.store.disk import replace_file, store_faults, write_at
from echo2d.store.slots.current_slot import SLOT_MANIFEST, CurrentSlot
from echo2d.store.slots.proofs import SlotProofs
from echo2d.store.snapshots import read_chunk


class SlotWriter:
    """Builds one version in a slot, chunk by chunk. Each chunk is verified before it is written."""

    def __init__(self, slot: Path, files: Sequence[FileEntry], proofs: SlotProofs) -> None:
        self._slot = slot
        self._model = slot / "model"
        self._proofs = proofs
        self._files = tuple(files)
        self._layout = chunk_layout(files)
        # The digest of each written chunk, and when it was hashed.
        self._standing: dict[ChunkId, tuple[Digest, float]] = {}
        self._ended = False
        self._writing = 0  # threads that are writing a chunk
        self._changed = threading.Condition()  # guards the three attributes above

    def write_chunk(self, chunk: ChunkId, data: Buffer, result: Digest) -> None:
        """Write a chunk. IntegrityFault: `data` does not have the digest `result`, or the chunk's
        length.
        """
        place, now = self._layout[chunk], time.monotonic()
        if len(data) != place.length or digest_of(data) != result:
            raise IntegrityFault(f"chunk {chunk} does not have the bytes that were promised")
        path = self._model / place.path
        with self._changed:
            self._require_open()
            self._standing.pop(chunk, None)
            self._writing += 1
        try:
            with store_faults("writing", path):
                write_at(path, data, place.offset)
            with self._changed:
                self._standing[chunk] = result, now
        finally:
            with self._changed:
                self._writing -= 1
                self._changed.notify_all()

    def commit(self, manifest: Manifest, epoch: Epoch, version: Version) -> CurrentSlot:
        """Make this slot the current one, and end the writer, which a StoreFault ends too.

        IntegrityFault: the chunks are not exactly those of `manifest`; the writer goes on.
        """
        with self._changed, store_faults("committing", self._slot):
            self._wait_for_writes()
            self._require_open()
            chunks = map(ChunkId, range(len(self._layout)))
            written = [self._standing.get(chunk, (None, 0.0)) for chunk in chunks]
            found = tuple(digest for digest, _ in written)
            if manifest.files != self._files or found != manifest.chunk_digests:
                raise IntegrityFault("the chunks in the slot are not those of the manifest")
            self._ended = True
            replace_file(self._slot / SLOT_MANIFEST, manifest.encode(), durable=False)
            self._proofs.add(self._model, manifest.digest, [at for _, at in written])
            current = CurrentSlot(self._model, epoch, version, manifest)
            current.flip()
            return current

    def end(self) -> None:
        """End the writer, after the writes under way."""
        with self._changed:
            self._ended = True
            self._wait_for_writes()

    def check(self) -> None:
        """Assert that the files hold the chunks that count as written."""
        for chunk, (digest, _) in self._standing.items():
            assert digest_of(read_chunk(self._model, self._layout[chunk])) == digest

    def _require_open(self) -> None:
        if self._ended:
            raise StoreFault("this slot writer has ended")

    def _wait_for_writes(self) -> None:
        self._changed.wait_for(lambda: self._writing == 0)
