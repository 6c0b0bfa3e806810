"""Keep two slots for snapshots: an engine loads from the current one while the next version is
built in the spare.

    root / current.json   names the current slot (`current_slot.py`)
         / a, b           a slot each; the spare one is incomplete until its commit

A delta may also be written over its base, in the current slot (`in_place.py`).

It keeps true: after the process is killed at any point exactly the old or exactly the new version
is current (I3); after a `StoreFault` it is the old one. Nothing is synced: a power failure may damage
both slots. So `require_intact` hashes a slot before an engine loads it, but for chunks that this
process hashed a moment ago (`proofs.py`). Blocking functions.
"""

import logging
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
    MANIFEST,
    SLOTS,
    CurrentSlot,
    model_files,
    read_current,
)
from echo2d.store.slots.in_place import AppliesInPlace
from echo2d.store.slots.proofs import SlotProofs
from echo2d.store.slots.slot_writer import SlotWriter

log = logging.getLogger("echo2d.store")


class SlotStore:
    """The two slots under `root`. One writer at a time: `begin` ends the writer before it.

    one_slot: empty the spare slot as soon as the version in the current one is served (`settle`).
    An apply in place that a kill has cut off is undone first; StoreFault: the disk refuses that.
    """

    def __init__(self, root: Path, budget: DiskBudget, *, one_slot: bool = False) -> None:
        self._root = root
        self._budget = budget
        self._one_slot = one_slot
        self._writer: SlotWriter | None = None
        self._proofs = SlotProofs()
        self._before: CurrentSlot | None = None  # the current slot when the last writer began
        self._lock = threading.RLock()
        with store_faults("opening the slots", root):
            root.mkdir(parents=True, exist_ok=True)
            for slot in SLOTS:
                files = model_files(root / slot / "model")
                budget.note(f"slot {slot}", sum(path.stat().st_size for path in files))
            self._in_place = AppliesInPlace(root, budget, self._proofs)
        with self._lock:
            self._mend()

    def current(self) -> CurrentSlot | None:
        """The last committed version. Only file names and sizes are checked
        (`snapshots.damaged_chunks` checks bytes).
        """
        with self._lock:
            self._mend()
            return read_current(self._root)

    def directories(self) -> tuple[Path, ...]:
        """The model directories of both slots, whatever their state."""
        return tuple(self._root / slot / "model" for slot in SLOTS)

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
                    self._in_place.clear(spare.name)
                    _prepare(spare, files)
            except StoreFault:
                shutil.rmtree(spare, ignore_errors=True)
                self._budget.note(f"slot {spare.name}", 0)
                raise
            self._writer = SlotWriter(spare, files, self._proofs)
            return self._writer

    def begin_in_place(self, base: CurrentSlot) -> SlotWriter:
        """Begin to write a version with the same files over `base`, which is current. Until the
        commit, `end` and a restart restore the base.

        Nothing may read the slot until the writer has ended. StoreFault: the disk is full, or
        another version is current by now.
        """
        with self._lock:
            self._end_writer()
            if self.current() != base:
                raise StoreFault(f"{base.directory} is not the current slot any more")
            # A version that was damaged gives way to the other slot's, and there is none to count on.
            self._before = None
            self._proofs.forget(base.directory)
            with store_faults("beginning to write in place in", base.directory):
                undo = self._in_place.begin(base)
            self._writer = SlotWriter(
                base.directory.parent, base.manifest.files, self._proofs, (undo, base)
            )
            return self._writer

    def settle(self, directory: Path) -> None:
        """The engines serve the version in this slot: delete what would undo it, and with
        `one_slot` what is in the other slot, unless that is being written or current.
        """
        if not self._one_slot and not self._in_place.undoable:
            return
        with self._lock, store_faults("settling", directory):
            if self._writer is not None and self._writer.unsure:
                return
            current = self.current()
            if current is None or current.directory != directory:
                return
            self._in_place.clear(current.slot)
            spare = self._spare(current)
            if self._one_slot and (self._writer is None or self._writer.ended) and spare.exists():
                self._before = None
                self._proofs.forget(spare / "model")
                (spare / MANIFEST).unlink(missing_ok=True)
                shutil.rmtree(spare)
                self._budget.note(f"slot {spare.name}", 0)

    def roll_back(self, directory: Path) -> CurrentSlot | None:
        """Turn the current slot back to the version that an apply in place has overwritten, and
        return that. None: this is not the current slot, or nothing can be undone.
        """
        with self._lock, store_faults("rolling back", directory):
            current = self.current()
            if current is None or current.directory != directory:
                return None
            base = self._in_place.base_of(current)
            if base is None:
                return None
            self._proofs.forget(directory)
            self._before = None
            # From here on a restart undoes it, too.
            base.flip()
            try:
                self._mend()
            except StoreFault as fault:
                # Whoever looks at the slot next undoes it first.
                log.warning("not undone yet path=%s error=%s", directory, fault)
            return base

    def require_intact(self, directory: Path, digest: Digest) -> None:
        """Check that a slot holds this snapshot, by hashing what is not proved.

        IntegrityFault: it is another snapshot or damaged. The slot has been given up: the version
        that was current before is current again, or none. A writer under way has ended, because it
        may copy from the slot. A writer in place ends before the check, because its slot changes.
        """
        with self._lock:
            if self._writer is not None and self._writer.unsure:
                self._writer.end()
            self._mend()
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
            if not (spare / MANIFEST).exists() or not self._proofs.holds(spare / "model", digest):
                return None
            manifest = Manifest.decode(read_file(spare / MANIFEST))
            again = CurrentSlot(spare / "model", epoch, version, manifest)
            again.flip()
            self._before = current
            return again

    def _mend(self) -> None:
        """Undo an apply in place that was cut off."""
        if self._writer is None or not self._writer.unsure:
            self._in_place.mend()

    def _end_writer(self) -> None:
        if self._writer is not None:
            self._writer.end()

    def _spare(self, current: CurrentSlot | None) -> Path:
        return self._root / (SLOTS[0] if current is None or current.slot == SLOTS[1] else SLOTS[1])

    def _give_up(self, directory: Path) -> None:
        current, before = self.current(), self._before
        if current is not None and current.directory == directory:
            if before is not None and before.directory != directory:
                before.flip()
            else:
                (self._root / CURRENT).unlink()
        (directory.parent / MANIFEST).unlink(missing_ok=True)
        self._in_place.clear(directory.parent.name)
        self._before = None


def _prepare(slot: Path, files: Sequence[FileEntry]) -> None:
    """Give the slot exactly these files, with their space reserved.

    The slot's manifest is deleted first, because it no longer describes the slot.
    """
    (slot / MANIFEST).unlink(missing_ok=True)
    model = slot / "model"
    there = {path.relative_to(model).as_posix() for path in model_files(model)}
    if there - {file.path for file in files}:
        shutil.rmtree(model)
    for file in files:
        path = model / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        allocate(path, file.size)
