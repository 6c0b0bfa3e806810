"""What the seed makes deltas from: a copy of the base, or deltas that lead from it to the version. Blocking.

Neither is believed: a chunk that is not what it was is encoded by itself, for nobody could decode its difference.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

from echo2d.core.canonical import digest_of
from echo2d.core.delta_chain import compose_record
from echo2d.core.forms import ChunkRecord, encode_record
from echo2d.core.ids import ChunkId, Digest
from echo2d.core.manifest import Chunk, Manifest
from echo2d.errors import IntegrityFault, OperatorFault, StoreFault
from echo2d.store.deltas import DeltaStore, StoredDelta
from echo2d.store.snapshots import build_manifest, read_chunk

log = logging.getLogger("echo2d.seed")


class BaseLost(IntegrityFault):
    """There is no such base here."""


class _Damage:
    """Said once of each base."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._said = threading.Lock()

    def note(self, place: Chunk, reason: object) -> None:
        if self._said.acquire(blocking=False):
            log.warning(
                "%s is damaged, chunks go in full path=%s offset=%d: %s", self._what, place.path, place.offset, reason
            )


class BaseCopy:
    """The snapshot directory of the base. manifest: of the base, if it is known; else all of it is hashed first."""

    def __init__(self, directory: Path, digest: Digest, manifest: Manifest | None) -> None:
        self._directory = directory
        try:
            known = manifest or build_manifest(directory)
        except (OperatorFault, IntegrityFault, StoreFault) as fault:
            raise BaseLost(str(fault)) from fault
        if known.digest != digest:
            raise BaseLost(f"{directory} is not the base that was published")
        self._digests = dict(zip(known.chunks, known.chunk_digests, strict=True))
        self._damage = _Damage(f"the base {directory.name}")

    def encode(self, position: ChunkId, place: Chunk, new: Callable[[], bytes]) -> tuple[ChunkRecord, bytes]:
        return encode_record(position, new(), self._read(place))

    def _read(self, place: Chunk) -> bytes | None:
        """The chunk; None: the base has none there, or it is damaged."""
        if place not in self._digests:
            return None
        try:
            data = read_chunk(self._directory, place)
        except (IntegrityFault, StoreFault) as fault:
            self._damage.note(place, fault)
            return None
        if digest_of(data) == self._digests[place]:
            return data
        self._damage.note(place, "it is not what was published")
        return None


class BaseChain:
    """Deltas that lead from the base to the version, the oldest first."""

    def __init__(self, deltas: Sequence[StoredDelta]) -> None:
        self._deltas = deltas
        self._damage = _Damage("a kept delta")

    @staticmethod
    def open(store: DeltaStore, base: Digest, via: Sequence[Digest], made: Digest) -> "BaseChain":
        """BaseLost: one of them is not kept any more."""
        try:
            return BaseChain([store.open(*pair) for pair in pairwise((base, *via, made))])
        except (IntegrityFault, StoreFault) as fault:
            raise BaseLost(str(fault)) from fault

    def encode(self, position: ChunkId, place: Chunk, new: Callable[[], bytes]) -> tuple[ChunkRecord, bytes]:
        try:
            chain = self._chain(place)
            if chain:
                return compose_record(position, chain, place.length, new)
        except (IntegrityFault, StoreFault) as fault:
            self._damage.note(place, fault)
        return encode_record(position, new())

    def _chain(self, place: Chunk) -> list[tuple[ChunkRecord, bytes]]:
        """What was made of the chunk, from where on it needs no base; empty: not all of it is known."""
        chain: list[tuple[ChunkRecord, bytes]] = []
        for delta in reversed(self._deltas):
            found = delta.read(place)
            if found is None:
                return []
            chain.insert(0, found)
            if not found[0].needs_base:
                break
        return chain
