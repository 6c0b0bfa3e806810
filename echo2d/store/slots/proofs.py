"""Remember which chunks of a slot this process has hashed a moment ago, so that an engine can load a newly
written version without hashing it again.

A chunk is proved for PROOF_S_MAX after this process hashed or wrote it, while every file of its slot
keeps its inode, size, mtime and ctime. Only root can set a ctime back, so a write by another program
after the commit is noticed (before Linux 6.13 only from the next clock tick on, up to 10 ms later).
Damage by the disk is not noticed, but within PROOF_S_MAX the chunk is still in memory. Blocking
functions.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from echo2d.core.base.ids import ChunkId, Digest
from echo2d.core.weights.manifest import Manifest
from echo2d.errors import IntegrityFault, StoreFault
from echo2d.store.disk import store_faults
from echo2d.store.slots.current_slot import SLOT_MANIFEST, model_files, read_manifest
from echo2d.store.snapshots import damaged_chunks

# After this time a chunk may have left the page cache, and be read from a disk that has damaged it.
PROOF_S_MAX = 60.0

log = logging.getLogger("echo2d.store")

_Stamps = tuple[tuple[int, int, int, int], ...]  # inode, size, mtime and ctime of every file


@dataclass(frozen=True, slots=True)
class _Proof:
    """Each chunk of this snapshot was hashed at its `proved_at` or later, and the files have had these
    stamps since then.
    """

    digest: Digest
    stamps: _Stamps
    proved_at: Sequence[float]


class SlotProofs:
    """The proofs of the slots, by the directory of their model files."""

    def __init__(self) -> None:
        self._proofs: dict[Path, _Proof] = {}

    def add(self, directory: Path, digest: Digest, proved_at: Sequence[float]) -> None:
        """Record that the slot holds this snapshot, and when its chunks were hashed."""
        self._proofs[directory] = _Proof(digest, _stamps(directory), proved_at)

    def holds(self, directory: Path, digest: Digest) -> bool:
        """Whether the slot holds this snapshot. Hashes the chunks that are not proved."""
        stamps, now = _stamps(directory), time.monotonic()
        proof, stale = self._proofs.get(directory), None
        if not stamps or proof is None or (proof.digest, proof.stamps) != (digest, stamps):
            proof = None
        else:
            stale = [
                ChunkId(place)
                for place, at in enumerate(proof.proved_at)
                if now >= at + PROOF_S_MAX
            ]
        if stale == []:
            return True
        manifest = _intact_manifest(directory, digest, stale)
        if manifest is None:
            return False
        times = [now] * len(manifest.chunk_digests) if proof is None else [*proof.proved_at]
        for place in stale or ():
            times[place] = now
        self._proofs[directory] = _Proof(digest, stamps, times)
        return True


def _stamps(directory: Path) -> _Stamps:
    """The stamps of a slot's manifest and files; empty if they cannot be read."""
    try:
        found = [
            path.stat()
            for path in (directory.parent / SLOT_MANIFEST, *sorted(model_files(directory)))
        ]
    except OSError:
        return ()
    return tuple((each.st_ino, each.st_size, each.st_mtime_ns, each.st_ctime_ns) for each in found)


def _intact_manifest(
    directory: Path, digest: Digest, among: Sequence[ChunkId] | None
) -> Manifest | None:
    """Read and hash the chunks `among` of a slot, or all. Returns the manifest of this snapshot if they
    are intact.
    """
    try:
        with store_faults("reading", directory):
            manifest = read_manifest(directory)
    except (IntegrityFault, StoreFault) as fault:
        log.warning("slot is damaged path=%s error=%s", directory, fault)
        return None
    intact = manifest.digest == digest and not damaged_chunks(directory, manifest, among)
    return manifest if intact else None
