"""Keep what undoes an apply in place, beside the slot that it changes.

    slot / undo.base   what current.json said of the base | newline | the base's manifest; while
                       this file exists, the slot may be turned back
         / undo.log    records: chunk, length, blake3-256 of both and of the payload | payload

A record is written before its chunk, and nothing is synced: a process that is killed leaves every
record but the last one whole, and the last one's chunk untouched. Its digest tells a torn record.
Blocking functions. `keep` may be called from several threads for different chunks.
"""

import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from echo2d.core.base.canonical import Buffer, digest_of, require
from echo2d.core.base.ids import DIGEST_BYTES, ChunkId
from echo2d.core.weights.chunk_undo import apply_undo, encode_undo
from echo2d.core.weights.manifest import CHUNK_BYTES, Chunk, Manifest
from echo2d.store.disk import allocate, read_at, read_file, replace_file, write_at
from echo2d.store.slots.current_slot import MANIFEST, CurrentSlot
from echo2d.store.snapshots import read_chunk

BASE = "undo.base"
LOG = "undo.log"
_HEAD = struct.Struct(f"<II{DIGEST_BYTES}s")


class UndoLog:
    """The undo log of one slot. Raises OSError, for the caller to translate.

    claim: told of the log's size before it grows, and when it is gone. StoreFault: no room.
    """

    def __init__(self, slot: Path, claim: Callable[[int], None]) -> None:
        self._slot, self._model, self._claim = slot, slot / "model", claim
        self._lock = threading.Lock()  # guards the one below
        self._end = 0

    @property
    def exists(self) -> bool:
        """Whether the slot can be turned back."""
        return (self._slot / BASE).exists()

    def base(self) -> CurrentSlot:
        """What the slot can be turned back to. ValueError, KeyError, TypeError, IntegrityFault:
        that is damaged.
        """
        current, _, manifest = read_file(self._slot / BASE).partition(b"\n")
        return CurrentSlot.decode(current, self._slot.parent, Manifest.decode(manifest))

    def begin(self, base: CurrentSlot) -> None:
        """Begin to keep what turns the slot back to this version, which it holds now."""
        self.clear()
        allocate(self._slot / LOG, 0)
        kept = base.encode() + b"\n" + base.manifest.encode()
        replace_file(self._slot / BASE, kept, durable=False)

    def keep(self, chunk: ChunkId, place: Chunk, new: Buffer) -> bool:
        """Keep what undoes writing `new` over this chunk, which is written once. False: it would
        change nothing.
        """
        payload = encode_undo(new, read_chunk(self._model, place))
        if payload is None:
            return False
        with self._lock:
            end = self._end + _HEAD.size + len(payload)
            self._claim(end)
            head = _HEAD.pack(chunk, len(payload), _digest(chunk, payload))
            write_at(self._slot / LOG, head + payload, self._end)
            self._end = end
        return True

    def undo(self, base: CurrentSlot) -> None:
        """Restore every chunk that was changed, and the manifest, as often as necessary; then
        clear the log. The chunks are not hashed here.
        """
        chunks = base.manifest.chunks
        for chunk, payload in self._records():
            require(chunk < len(chunks), "an undo record is of another snapshot")
            data = bytearray(read_chunk(self._model, chunks[chunk]))
            apply_undo(payload, data)
            write_at(self._model / chunks[chunk].path, data, chunks[chunk].offset)
        manifest = self._slot / MANIFEST
        if not manifest.exists() or read_file(manifest) != base.manifest.encode():
            replace_file(manifest, base.manifest.encode(), durable=False)
        self.clear()

    def clear(self) -> None:
        """Forget it: the slot stays as it is."""
        # First this file: without it nothing is undone.
        (self._slot / BASE).unlink(missing_ok=True)
        (self._slot / LOG).unlink(missing_ok=True)
        with self._lock:
            self._end = 0
            self._claim(0)

    def size(self) -> int:
        path = self._slot / LOG
        return path.stat().st_size if path.exists() else 0

    def _records(self) -> Iterator[tuple[ChunkId, bytes]]:
        """Yield the whole records, up to the first that is torn."""
        path, at = self._slot / LOG, 0
        while path.exists() and len(head := read_at(path, _HEAD.size, at)) == _HEAD.size:
            chunk, length, digest = _HEAD.unpack(head)
            payload = read_at(path, min(length, CHUNK_BYTES), at + _HEAD.size)
            if len(payload) != length or _digest(chunk, payload) != digest:
                return
            yield ChunkId(chunk), payload
            at += _HEAD.size + length


def _digest(chunk: int, payload: bytes) -> bytes:
    # A payload's length and chunk are hashed too, because a torn head may name others.
    return digest_of(struct.pack("<II", chunk, len(payload)) + payload)
