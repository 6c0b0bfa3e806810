"""Write one version into a slot, chunk by chunk, and make the slot current with its commit.

The slot is the spare one, or the current one whose version is the base of a delta. Then what undoes
each chunk is kept before the chunk is overwritten (`undo_log.py`), and a writer that ends without a
commit restores the base. Blocking functions. The methods of a writer may be called from several
threads for different chunks.
"""

import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from echo2d.core.base.canonical import Buffer, digest_of
from echo2d.core.base.ids import ChunkId, Digest, Epoch, Version
from echo2d.core.weights.manifest import FileEntry, Manifest, chunk_layout
from echo2d.errors import IntegrityFault, StoreFault
from echo2d.store.disk import replace_file, store_faults, write_at
from echo2d.store.slots.current_slot import MANIFEST, CurrentSlot
from echo2d.store.slots.proofs import SlotProofs
from echo2d.store.slots.undo_log import UndoLog
from echo2d.store.snapshots import read_chunk

log = logging.getLogger("echo2d.store")


class SlotWriter:
    """Builds one version in a slot, chunk by chunk. Each chunk is verified before it is written.

    undo: where to keep what undoes it, and the version that the slot holds; None: the slot is the
    spare one, and holds nothing worth keeping.
    """

    def __init__(
        self,
        slot: Path,
        files: Sequence[FileEntry],
        proofs: SlotProofs,
        undo: tuple[UndoLog, CurrentSlot] | None = None,
    ) -> None:
        self._slot = slot
        self._undo = undo
        self._model = slot / "model"
        self._proofs = proofs
        self._files = tuple(files)
        self._layout = chunk_layout(files)
        # The digest of each chunk that is in its file, and when it was hashed.
        self._standing: dict[ChunkId, tuple[Digest, float]] = {}
        self._ended = False
        self._half_written = False  # in place, a chunk is
        self._writing = 0  # threads that are writing a chunk
        self._changed = threading.Condition()  # guards the four above

    @property
    def ended(self) -> bool:
        return self._ended

    @property
    def unsure(self) -> bool:
        """Whether it writes in place and was neither committed nor undone."""
        return self._undo is not None

    def has_written(self, chunk: ChunkId, result: Digest) -> bool:
        """Whether this chunk is in its file. Its base is then no longer there, if it was written in
        place.
        """
        with self._changed:
            return self._standing.get(chunk, (None,))[0] == result

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
                if self._undo is None:
                    write_at(path, data, place.offset)
                elif self._undo[0].keep(chunk, place, data):
                    self._overwrite(path, data, place.offset)
            with self._changed:
                self._standing[chunk] = result, now
        finally:
            with self._changed:
                self._writing -= 1
                self._changed.notify_all()

    def commit(self, manifest: Manifest, epoch: Epoch, version: Version) -> CurrentSlot:
        """Make this slot the current one. The writer has ended then, and after a StoreFault.

        IntegrityFault: the chunks are not exactly those of `manifest`; the writer goes on.
        """
        with self._changed, store_faults("committing", self._slot):
            self._wait_for_writes()
            self._require_open()
            chunks = map(ChunkId, range(len(self._layout)))
            standing = [self._standing.get(chunk, (None, 0.0)) for chunk in chunks]
            found = tuple(digest for digest, _ in standing)
            if manifest.files != self._files or found != manifest.chunk_digests:
                raise IntegrityFault("the chunks in the slot are not those of the manifest")
            self._ended = True
            replace_file(self._slot / MANIFEST, manifest.encode(), durable=False)
            self._proofs.add(self._model, manifest.digest, [at for _, at in standing])
            current = CurrentSlot(self._model, epoch, version, manifest)
            current.flip()
            self._undo = None
            return current

    def end(self) -> None:
        """End the writer. It writes nothing more, and undoes what it has written in place."""
        with self._changed:
            self._ended = True
            self._wait_for_writes()
            if self._undo is None:
                return
            self._proofs.forget(self._model)
            try:
                with store_faults("undoing an apply in", self._slot):
                    self._undo[0].undo(self._undo[1])
            except (IntegrityFault, StoreFault) as fault:
                # The store tries again before anything else is done with the slot.
                log.warning("not undone yet path=%s error=%s", self._slot, fault)
            finally:
                self._undo = None

    def check(self) -> None:
        """Assert that the chunks said to be written are in the files."""
        for chunk, (digest, _) in self._standing.items():
            assert digest_of(read_chunk(self._model, self._layout[chunk])) == digest

    def _overwrite(self, path: Path, data: Buffer, offset: int) -> None:
        try:
            write_at(path, data, offset)
        except OSError:
            # The base of this chunk may be gone, so the chunk cannot be decoded once more.
            self._half_written = True
            raise

    def _require_open(self) -> None:
        if self._ended:
            raise StoreFault("this slot writer has ended")
        if self._half_written:
            raise StoreFault(f"a chunk in {self._slot} is half written")

    def _wait_for_writes(self) -> None:
        self._changed.wait_for(lambda: self._writing == 0)
