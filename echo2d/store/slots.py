"""Keep two slots for snapshots: an engine loads from the current one while the next version is
built in the spare.

    root / current.json        {"slot": "a", "epoch": 1, "version": 7, "digest": "..."};
                               replaced by one atomic rename
           a / manifest        the manifest of slot a; written when the slot is complete
             / model / ...     the files that an engine loads
           b / ...             the spare slot: incomplete until its commit

A delta may also be written over its base, in the current slot (`begin_in_place`). What undoes it is
kept beside the slot (`store/undo_log.py`) until the version is served:

    base --begin_in_place--> changing --commit--> new, unsettled --settle--> new
     ^                          |                      |
     +------ end, restart ------+------ roll_back -----+

It keeps true: after the process is killed at any point exactly the old or exactly the new version
is current (I3); after a `StoreFault` it is the old one. Nothing is synced: a power failure may damage
both slots. So `require_intact` hashes a slot before an engine loads it, but for chunks that this
process hashed a moment ago. Blocking functions. The methods of a writer may be called from several threads for
different chunks.
"""

import json
import logging
import math
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from echo2d.core.base.canonical import Buffer, digest_of
from echo2d.core.base.ids import ChunkId, Digest, Epoch, Version
from echo2d.core.weights.manifest import FileEntry, Manifest, check_files, chunk_layout
from echo2d.errors import IntegrityFault, StoreFault
from echo2d.store.budget import DiskBudget
from echo2d.store.disk import (
    allocate,
    read_file,
    replace_file,
    store_faults,
    write_at,
)
from echo2d.store.snapshots import damaged_chunks, read_chunk
from echo2d.store.undo_log import UndoBase, UndoLog

SLOTS = ("a", "b")
CURRENT = "current.json"
MANIFEST = "manifest"
# After longer than this, a chunk may have left the page cache and be read from a disk that has
# damaged it.
PROOF_S_MAX = 60.0

log = logging.getLogger("echo2d.store")


@dataclass(frozen=True, slots=True)
class CurrentSlot:
    """The current version. directory: its model files, to be read only while it is current."""

    directory: Path
    epoch: Epoch
    version: Version
    manifest: Manifest

    @property
    def slot(self) -> str:
        return self.directory.parent.name


_Stamps = tuple[tuple[int, int, int, int], ...]  # inode, size, mtime and ctime of every file


@dataclass(frozen=True, slots=True)
class _Proof:
    """Proof that a slot held this snapshot: each chunk was hashed at its `proved_at` or later, and
    the files had these stamps since.
    """

    digest: Digest
    stamps: _Stamps
    proved_at: Sequence[float]

    def stale(self, now: float) -> list[ChunkId]:
        """The chunks that have to be hashed again."""
        return [
            ChunkId(position)
            for position, at in enumerate(self.proved_at)
            if now >= at + PROOF_S_MAX
        ]

    def renewed(self, now: float) -> "_Proof":
        """The stale chunks have been hashed again."""
        stale = {*self.stale(now)}
        times = [now if place in stale else at for place, at in enumerate(self.proved_at)]
        return _Proof(self.digest, self.stamps, times)


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
        self._proofs: dict[Path, _Proof] = {}  # by directory; made by this process
        self._before: CurrentSlot | None = None  # the current slot when the last writer began
        self._lock = threading.RLock()
        self._undoable = True  # whether an undo log may be on disk
        with store_faults("opening the slots", root):
            root.mkdir(parents=True, exist_ok=True)
            for slot in SLOTS:
                budget.note(
                    f"slot {slot}",
                    sum(path.stat().st_size for path in _model_files(root / slot / "model")),
                )
                budget.note(f"undo {slot}", self._undo_log(slot).size())
        with self._lock:
            self._mend()

    def current(self) -> CurrentSlot | None:
        """The last committed version. Only file names and sizes are checked
        (`snapshots.damaged_chunks` checks bytes).
        """
        with self._lock:
            self._mend()
            return self._current()

    def directories(self) -> tuple[Path, ...]:
        """The model directories of both slots, whatever their state."""
        return tuple(self._root / slot / "model" for slot in SLOTS)

    def begin(self, files: Sequence[FileEntry]) -> "SlotWriter":
        """Begin to write a version into the spare slot, with the space for all files reserved.

        The engine must not use the spare slot's files any more. StoreFault: the disk is full, and
        the spare slot has been deleted.
        """
        check_files(files)
        with self._lock:
            return self._begin(files)

    def begin_in_place(self, base: CurrentSlot) -> "SlotWriter":
        """Begin to write a version with the same files over `base`, which is current. Until the
        commit, `end` and a restart restore the base.

        Nothing may read the slot until the writer has ended. StoreFault: the disk is full, or
        another version is current by now.
        """
        with self._lock:
            if self._writer is not None:
                self._writer.end()
            if self.current() != base:
                raise StoreFault(f"{base.directory} is not the current slot any more")
            # A version that was damaged gives way to the other slot's, and there is none to count on.
            self._before = None
            self._proofs.pop(base.directory, None)
            undo = self._undo_log(base.slot)
            self._undoable = True
            kept = UndoBase(_facts(base), base.manifest)
            with store_faults("beginning to write in place in", base.directory):
                undo.begin(kept)
            self._writer = SlotWriter(
                base.directory.parent, base.manifest.files, self._proofs, (undo, kept)
            )
            return self._writer

    def settle(self, directory: Path) -> None:
        """The engines serve the version in this slot: delete what would undo it, and with
        `one_slot` what is in the other slot, unless that is being written or current.
        """
        if not self._one_slot and not self._undoable:
            return
        with self._lock, store_faults("settling", directory):
            if self._writer is not None and self._writer.unsure:
                return
            current = self.current()
            if current is None or current.directory != directory:
                return
            if self._undoable:
                self._undo_log(current.slot).clear()
            spare = self._spare(current)
            if self._one_slot and (self._writer is None or self._writer.ended) and spare.exists():
                self._before = None
                self._proofs.pop(spare / "model", None)
                (spare / MANIFEST).unlink(missing_ok=True)
                shutil.rmtree(spare)
                self._budget.note(f"slot {spare.name}", 0)

    def roll_back(self, directory: Path) -> CurrentSlot | None:
        """Turn the current slot back to the version that an apply in place has overwritten, and
        return that. None: this is not the current slot, or nothing can be undone.
        """
        with self._lock, store_faults("rolling back", directory):
            current = self.current()
            if current is None or current.directory != directory or not self._undoable:
                return None
            undo = self._undo_log(current.slot)
            if not undo.exists:
                return None
            try:
                base = undo.base()
                old = _slot_of(self._root, base.current, base.manifest)
            except (ValueError, KeyError, TypeError, IntegrityFault) as error:
                log.warning("cannot be undone path=%s error=%s", directory, error)
                return None
            self._proofs.pop(directory, None)
            self._before = None
            # From here on a restart undoes it, too.
            _flip(old)
            try:
                self._mend()
            except StoreFault as fault:
                # Whoever looks at the slot next tries again, and finds no other version in it.
                log.warning("not undone yet path=%s error=%s", directory, fault)
            return old

    def require_intact(self, directory: Path, digest: Digest) -> None:
        """Check that a slot holds this snapshot, by hashing what is not proved.

        A chunk is proved for PROOF_S_MAX after this process hashed or wrote it, while every file
        keeps its inode, size, mtime and ctime. Only root can set a ctime back, so a program that
        writes there after the commit is noticed (before Linux 6.13, from the next clock tick on, up to
        10 ms later).
        Damage by the disk is not; but so soon after, the chunk is still in memory.

        IntegrityFault: it is another snapshot or damaged. The slot has been given up: the version
        that was current before is current again, or none. A writer under way has ended, because it
        may copy from the slot. One that writes in place ends first: engines do not read what changes.
        """
        with self._lock:
            if self._writer is not None and self._writer.unsure:
                self._writer.end()
            self._mend()
        if self._is_proved(directory, digest):
            return
        with self._lock, store_faults("giving up", directory):
            if self._writer is not None:
                self._writer.end()
            self._give_up(directory)
        raise IntegrityFault(f"{directory} is damaged: it is not the snapshot that was written")

    def take_again(self, digest: Digest, epoch: Epoch, version: Version) -> CurrentSlot | None:
        """Make the spare slot current again if it holds this snapshot. None: it does not, and
        nothing has changed.
        """
        with self._lock, store_faults("taking a slot again in", self._root):
            current = self.current()
            spare = self._spare(current)
            if not (spare / MANIFEST).exists() or not self._is_proved(spare / "model", digest):
                return None
            again = CurrentSlot(
                spare / "model", epoch, version, Manifest.decode(read_file(spare / MANIFEST))
            )
            _flip(again)
            self._before = current
            return again

    def _is_proved(self, directory: Path, digest: Digest) -> bool:
        """Whether the slot holds this snapshot; see `require_intact`."""
        stamps, now = _stamps(directory), time.monotonic()
        proof = self._proofs.get(directory)
        proved = stamps and proof and (proof.digest, proof.stamps) == (digest, stamps)
        stale = proof.stale(now) if proof and proved else None
        if stale == []:
            return True
        manifest = _intact_manifest(directory, digest, stale)
        if manifest is None:
            return False
        unproved = _Proof(digest, stamps, [-math.inf] * len(manifest.chunk_digests))
        self._proofs[directory] = (proof if proof and proved else unproved).renewed(now)
        return True

    def _current(self) -> CurrentSlot | None:
        path = self._root / CURRENT
        try:
            with store_faults("reading", path):
                return _read_current(self._root, read_file(path)) if path.exists() else None
        except (ValueError, KeyError, TypeError, IntegrityFault) as error:
            log.warning("current slot is damaged path=%s error=%s", path, error)
            return None

    def _undo_log(self, slot: str) -> UndoLog:
        return UndoLog(self._root / slot, partial(self._budget.claim, f"undo {slot}"))

    def _mend(self) -> None:
        """Undo an apply in place that was begun and neither committed nor undone.

        That is so if current.json still says what it said when the apply began. If it names this
        slot's next version, that one is complete; if it names the other slot, nothing is to be
        undone any more.
        """
        if not self._undoable or (self._writer is not None and self._writer.unsure):
            return
        path, left = self._root / CURRENT, False
        with store_faults("undoing an apply in", self._root):
            says = read_file(path) if path.exists() else b""
            for slot in SLOTS:
                undo = self._undo_log(slot)
                try:
                    base = undo.base() if undo.exists else None
                    if base is not None and base.current == says:
                        log.info("undoing an apply slot=%s", slot)
                        self._proofs.pop(self._root / slot / "model", None)
                        undo.undo(base)
                    elif base is not None and json.loads(says)["slot"] == slot:
                        left = True
                    else:
                        undo.clear()
                except (ValueError, KeyError, TypeError, IntegrityFault) as error:
                    # `require_intact` finds out what is in the slot.
                    log.warning("cannot be undone slot=%s error=%s", slot, error)
                    undo.clear()
        self._undoable = left

    def _spare(self, current: CurrentSlot | None) -> Path:
        return self._root / (SLOTS[0] if current is None or current.slot == SLOTS[1] else SLOTS[1])

    def _give_up(self, directory: Path) -> None:
        current, before = self.current(), self._before
        if current is not None and current.directory == directory:
            if before is not None and before.directory != directory:
                _flip(before)
            else:
                (self._root / CURRENT).unlink()
        (directory.parent / MANIFEST).unlink(missing_ok=True)
        if self._undoable:
            self._undo_log(directory.parent.name).clear()
        self._before = None

    def _begin(self, files: Sequence[FileEntry]) -> "SlotWriter":
        if self._writer is not None:
            self._writer.end()
        current = self._before = self.current()
        spare = self._spare(current)
        try:
            self._budget.claim(f"slot {spare.name}", sum(file.size for file in files))
            with store_faults("preparing the slot", spare):
                if self._undoable:
                    self._undo_log(spare.name).clear()
                _prepare(spare, files)
        except StoreFault:
            shutil.rmtree(spare, ignore_errors=True)
            self._budget.note(f"slot {spare.name}", 0)
            raise
        self._writer = SlotWriter(spare, files, self._proofs)
        return self._writer


class SlotWriter:
    """Builds one version in a slot, chunk by chunk. Each chunk is verified before it is written.

    undo: where to keep what undoes it, and the version that the slot holds; None: the slot is the
    spare one, and holds nothing worth keeping.
    """

    def __init__(
        self,
        slot: Path,
        files: Sequence[FileEntry],
        proofs: dict[Path, _Proof],
        undo: tuple[UndoLog, UndoBase] | None = None,
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
            standing = [self._standing.get(ChunkId(each)) for each in range(len(self._layout))]
            found = tuple(None if each is None else each[0] for each in standing)
            if manifest.files != self._files or found != manifest.chunk_digests:
                raise IntegrityFault("the chunks in the slot are not those of the manifest")
            self._ended = True
            replace_file(self._slot / MANIFEST, manifest.encode(), durable=False)
            times = [0.0 if each is None else each[1] for each in standing]
            self._proofs[self._model] = _Proof(manifest.digest, _stamps(self._model), times)
            current = CurrentSlot(self._model, epoch, version, manifest)
            _flip(current)
            self._undo = None
            return current

    def end(self) -> None:
        """End the writer. It writes nothing more, and undoes what it has written in place."""
        with self._changed:
            self._ended = True
            self._wait_for_writes()
            if self._undo is None:
                return
            self._proofs.pop(self._model, None)
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


def _flip(to: CurrentSlot) -> None:
    """Make this slot the current one by one atomic rename."""
    replace_file(to.directory.parent.parent / CURRENT, _facts(to), durable=False)


def _facts(of: CurrentSlot) -> bytes:
    """The text of current.json while this slot is current."""
    digest = of.manifest.digest.hex()
    facts = {"slot": of.slot, "epoch": of.epoch, "version": of.version, "digest": digest}
    return json.dumps(facts).encode()


def _stamps(directory: Path) -> _Stamps:
    """The stamps of a slot's manifest and files; empty if they cannot be read."""
    try:
        found = [
            path.stat() for path in (directory.parent / MANIFEST, *sorted(_model_files(directory)))
        ]
    except OSError:
        return ()
    return tuple((each.st_ino, each.st_size, each.st_mtime_ns, each.st_ctime_ns) for each in found)


def _intact_manifest(
    directory: Path, digest: Digest, among: Sequence[ChunkId] | None
) -> Manifest | None:
    """The manifest of this snapshot if the files in a slot's directory are intact: all chunks, or
    those `among`, are read and hashed.
    """
    try:
        with store_faults("reading", directory):
            manifest = Manifest.decode(read_file(directory.parent / MANIFEST))
            _check_sizes(directory, manifest)
    except (IntegrityFault, StoreFault) as fault:
        log.warning("slot is damaged path=%s error=%s", directory, fault)
        return None
    intact = manifest.digest == digest and not damaged_chunks(directory, manifest, among)
    return manifest if intact else None


def _read_current(root: Path, text: bytes) -> CurrentSlot:
    """Read the slot that current.json names. ValueError, KeyError, TypeError, IntegrityFault: it is
    damaged.
    """
    slot = root / SLOTS[SLOTS.index(json.loads(text)["slot"])]
    if not (slot / MANIFEST).exists():
        raise IntegrityFault("the slot has no manifest")
    current = _slot_of(root, text, Manifest.decode(read_file(slot / MANIFEST)))
    _check_sizes(current.directory, current.manifest)
    return current


def _slot_of(root: Path, text: bytes, manifest: Manifest) -> CurrentSlot:
    """The slot that the text of a current.json names, with this manifest; else as above."""
    facts = json.loads(text)
    if manifest.digest.hex() != facts["digest"]:
        raise IntegrityFault("the slot's manifest is another version's")
    model = root / SLOTS[SLOTS.index(facts["slot"])] / "model"
    return CurrentSlot(model, Epoch(int(facts["epoch"])), Version(int(facts["version"])), manifest)


def _check_sizes(model: Path, manifest: Manifest) -> None:
    for file in manifest.files:
        if not (model / file.path).exists() or (model / file.path).stat().st_size != file.size:
            raise IntegrityFault(f"{file.path} is missing or has another size")


def _model_files(model: Path) -> list[Path]:
    """All files below a directory."""
    return [path for path in model.rglob("*") if not path.is_dir()]


def _prepare(slot: Path, files: Sequence[FileEntry]) -> None:
    """Give the slot exactly these files, with their space reserved.

    The slot's manifest is deleted first, because it no longer describes the slot.
    """
    (slot / MANIFEST).unlink(missing_ok=True)
    model = slot / "model"
    there = {path.relative_to(model).as_posix() for path in _model_files(model)}
    if there - {file.path for file in files}:
        shutil.rmtree(model)
    for file in files:
        path = model / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        allocate(path, file.size)
