"""The sources of delta forms: a copy of the base, or kept deltas from the base to the version.

Calls block. Neither source is trusted: if a chunk of it has changed on disk since it was published, the
new chunk is encoded in full, because no worker could decode a delta against the changed bytes.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from echo2d.core.base.canonical import Buffer, digest_of
from echo2d.core.base.ids import ChunkId, Digest
from echo2d.core.weights.delta_chain import compose_record
from echo2d.core.weights.form import ChunkRecord, base_sum, encode_records
from echo2d.core.weights.manifest import CHUNK_BYTES, Chunk, Manifest, chunk_layout
from echo2d.errors import IntegrityFault, OperatorFault, StoreFault
from echo2d.runtime.seed.encoder import EncodedRecords
from echo2d.store.deltas import DeltaStore, StoredDelta
from echo2d.store.snapshots import read_chunk_into, scan_snapshot
from echo2d.threads import Buffers, in_threads

log = logging.getLogger("echo2d.seed")


class BaseLost(IntegrityFault):
    """The base of a delta is not on this disk, or not the one that was published."""


class _Damage:
    """Logs damage once per base, in the thread that finds it first."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._logged = threading.Lock()

    def note(self, place: Chunk, reason: object) -> None:
        if self._logged.acquire(blocking=False):
            log.warning(
                "%s is damaged, chunks go in full path=%s offset=%d: %s",
                self._what,
                place.path,
                place.offset,
                reason,
            )


class BaseCopy:
    """The snapshot directory of the base.

    sums: `base_sum` of each chunk if known; otherwise the whole directory is hashed first.
    BaseLost: the directory is not the snapshot with this digest.
    """

    def __init__(self, directory: Path, digest: Digest, sums: Mapping[Chunk, bytes] | None) -> None:
        self._directory = directory
        self._sums = _sums_of(directory, digest) if sums is None else sums
        self._damage = _Damage(f"the base {directory.name}")
        self._buffers = Buffers(CHUNK_BYTES)

    def encode(self, position: ChunkId, place: Chunk, new: Callable[[], Buffer]) -> EncodedRecords:
        data = new()
        with self._buffers.one() as buffer:
            records = encode_records(position, data, self._read(place, buffer))
        # A worker has the published base, so a delta against other bytes would decode to wrong bytes.
        if any(record.needs_base and record.base != self._sums[place] for record, _ in records):
            self._damage.note(place, "it is not what was published")
            return encode_records(position, data)
        return records

    def _read(self, place: Chunk, buffer: memoryview) -> memoryview | None:
        """The chunk's bytes; None if the base has no such chunk or it cannot be read."""
        if place not in self._sums:
            return None
        try:
            return read_chunk_into(self._directory, place, buffer)
        except (IntegrityFault, StoreFault) as fault:
            self._damage.note(place, fault)
            return None


def _sums_of(directory: Path, digest: Digest) -> dict[Chunk, bytes]:
    """`base_sum` of each chunk. BaseLost: the directory does not hold the snapshot `digest`."""
    try:
        files = scan_snapshot(directory)
        chunks, buffers = chunk_layout(files), Buffers(CHUNK_BYTES)

        def hashed(chunk: Chunk) -> tuple[bytes, Digest]:
            with buffers.one() as buffer:
                data = read_chunk_into(directory, chunk, buffer)
                return base_sum(data), digest_of(data)

        sums, digests = zip(*in_threads(hashed, chunks), strict=True)
    except (OperatorFault, IntegrityFault, StoreFault) as fault:
        raise BaseLost(str(fault)) from fault
    if Manifest(files, digests).digest != digest:
        raise BaseLost(f"{directory} is not the base that was published")
    return dict(zip(chunks, sums, strict=True))


class BaseChain:
    """Consecutive deltas from the base to the version, oldest first."""

    def __init__(self, deltas: Sequence[StoredDelta]) -> None:
        self._deltas = deltas
        self._damage = _Damage("a kept delta")

    @staticmethod
    def open(store: DeltaStore, base: Digest, via: Sequence[Digest], made: Digest) -> "BaseChain":
        """The chain base -> via ... -> made. BaseLost: one of its deltas is no longer kept."""
        try:
            return BaseChain([store.open(*pair) for pair in pairwise((base, *via, made))])
        except (IntegrityFault, StoreFault) as fault:
            raise BaseLost(str(fault)) from fault

    def encode(self, position: ChunkId, place: Chunk, new: Callable[[], Buffer]) -> EncodedRecords:
        try:
            chain = self._chain(place)
            if chain:
                composed = compose_record(position, chain, place.length, new)
                return composed, composed
        except (IntegrityFault, StoreFault) as fault:
            self._damage.note(place, fault)
        return encode_records(position, new())

    def _chain(self, place: Chunk) -> list[tuple[ChunkRecord, bytes]]:
        """The chunk's records, oldest first; empty if a delta of the chain lacks the chunk.

        The chain starts at the newest record that needs no base, because this record would overwrite the older ones.
        """
        chain: list[tuple[ChunkRecord, bytes]] = []
        for delta in reversed(self._deltas):
            found = delta.read(place)
            if found is None:
                return []
            chain.insert(0, found)
            if not found[0].needs_base:
                break
        return chain
