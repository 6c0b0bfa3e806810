"""Keep two slots for snapshots: an engine loads from the current one while the next version is
built in the spare.

    root / current.json   names the current slot (`current_slot.py`)
         / a, b           a slot each; the spare one is incomplete until its commit

Invariant: after the process is killed at any point exactly the old or exactly the new version is
current (I3); after a `StoreFault` it is the old one. Nothing is synced: a power failure may damage
both slots. So `require_intact` hashes a slot before an engine loads it, except chunks that this
process hashed a moment ago (`proofs.py`). Blocking functions.
"""

import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

from echo2d.core.base.ids import Digest, Epoch, Version
from echo2d.core.weights.manifest import FileEntry, Manifest, check_files
from echo2d.errors import IntegrityFault, StoreFault
from echo2d.store.budget import DiskBudget
from echo2d.store.disk import allocate, read_file, store_faults
from echo2d.store.slots.current_slot import (
    CURRENT,
    SLOT_MANIFEST,
    SLOT_NAMES,
    CurrentSlot,
    model_files,
    read_current,
)
from echo2d.store.slots.proofs import SlotProofs
from echo2d.store.slots.slot_writer import SlotWriter


class SlotStore:
    """The two slots under `root`. One writer at a time: `begin` ends the writer before it."""

    def __init__(self, root: Path, budget: DiskBudget) -> None:
        self._root = root
        self._budget = budget
        self._writer: SlotWriter | None = None
        self._proofs = SlotProofs()
        self._before: CurrentSlot | None = None  # the current slot when the last writer began
        self._lock = threading.Lock()
        with store_faults("opening the slots", root):
            root.mkdir(parents=True, exist_ok=True)
            for slot in SLOT_NAMES:
                files = model_files(root / slot / "model")
                budget.note(f"slot {slot}", sum(path.stat().st_size for path in files))

    def current(self) -> CurrentSlot | None:
        """The last committed version. Only file names and sizes are checked
        (`snapshots.damaged_chunks` checks bytes).
        """
        return read_current(self._root)

    def directories(self) -> tuple[Path, ...]:
        """The model directories of both slots, whatever their state."""
        return tuple(self._root / slot / "model" for slot in SLOT_NAMES)

    def begin(self, files: Sequence[FileEntry]) -> SlotWriter:
        """Begin to write a version into the spare slot, with the space for all files reserved.

        The engine must not use the spare slot's files any more. StoreFault: the disk is full, and
        the spare slot has been deleted.
        """
        check_files(files)
        with self._lock:
            self._end_writer()
            self._before = self.current()
            spare = self._spare(self._before)
            try:
                self._budget.claim(f"slot {spare.name}", sum(file.size for file in files))
                with store_faults("preparing the slot", spare):
                    _prepare(spare, files)
            except StoreFault:
                shutil.rmtree(spare, ignore_errors=True)
                self._budget.note(f"slot {spare.name}", 0)
                raise
            self._writer = SlotWriter(spare, files, self._proofs)
            return self._writer

    def require_intact(self, directory: Path, digest: Digest) -> None:
        """Check that a slot holds this snapshot, by hashing the chunks that are not proved.

        IntegrityFault: it is another snapshot or damaged. The slot is then no longer used: the version
        that was current before is current again, or none. A writer that is under way is ended, because it may
        copy from the slot.
        """
        if self._proofs.holds(directory, digest):
            return
        with self._lock, store_faults("giving up", directory):
            self._end_writer()
            self._give_up(directory)
        raise IntegrityFault(f"{directory} is damaged: it is not the snapshot that was written")

    def take_again(self, digest: Digest, epoch: Epoch, version: Version) -> CurrentSlot | None:
        """Make the spare slot current again if it holds this snapshot. None: it does not, and
        nothing has changed.
        """
        with self._lock, store_faults("taking a slot again in", self._root):
            current = self.current()
            spare = self._spare(current)
            if not (spare / SLOT_MANIFEST).exists() or not self._proofs.holds(
                spare / "model", digest
            ):
                return None
            manifest = Manifest.decode(read_file(spare / SLOT_MANIFEST))
            again = CurrentSlot(spare / "model", epoch, version, manifest)
            again.flip()
            self._before = current
            return again

    def _end_writer(self) -> None:
        if self._writer is not None:
            self._writer.end()

    def _spare(self, current: CurrentSlot | None) -> Path:
        return self._root / (
            SLOT_NAMES[0] if current is None or current.slot == SLOT_NAMES[1] else SLOT_NAMES[1]
        )

    def _give_up(self, directory: Path) -> None:
        current, before = self.current(), self._before
        if current is not None and current.directory == directory:
            if before is not None and before.directory != directory:
                before.flip()
            else:
                (self._root / CURRENT).unlink()
        (directory.parent / SLOT_MANIFEST).unlink(missing_ok=True)
        self._before = None


def _prepare(slot: Path, files: Sequence[FileEntry]) -> None:
    """Give the slot exactly these files, with their space reserved.

    The slot's manifest is deleted first, because it no longer describes the slot.
    """
    (slot / SLOT_MANIFEST).unlink(missing_ok=True)
    model = slot / "model"
    there = {path.relative_to(model).as_posix() for path in model_files(model)}
    if there - {file.path for file in files}:
        shutil.rmtree(model)
    for file in files:
        path = model / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        allocate(path, file.size)
