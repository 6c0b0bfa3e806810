"""Write the files of a snapshot in a few threads, and compute the digest of each chunk meanwhile.

A publish that sends these digests is answered at once: the coordinator need not read the files first.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from echo2d.core.base.canonical import Buffer
from echo2d.core.base.ids import Digest
from echo2d.core.weights.manifest import Chunk, FileEntry, Manifest, chunk_layout
from echo2d.errors import OperatorFault
from echo2d.threads import in_threads


@dataclass(frozen=True, slots=True)
class SnapshotFile:
    """A file to write."""

    path: str  # below the snapshot's directory, at most one folder deep
    size: int  # bytes
    header_bytes: int  # 8 + N for a safetensors file, 0 for all others
    parts: Iterable[Buffer]  # the content, in order; they may be made while the file is written


def write_snapshot(directory: Path, files: Sequence[SnapshotFile]) -> bytes:
    """Write new files into a directory. Returns the manifest, an argument of `publish`.

    Up to 80 chunks of 8 MiB are in memory at a time. Nothing is synced. OSError: a file cannot be
    written. OperatorFault: a file's parts are shorter or longer than its size. IntegrityFault: a file
    has a name that no snapshot may have.
    """
    entries = tuple(FileEntry(file.path, file.size, file.header_bytes) for file in files)
    digests: dict[Chunk, Digest] = {}
    for file, entry in zip(files, entries, strict=True):
        path = directory / file.path
        path.parent.mkdir(exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            chunks = chunk_layout([entry])

            def write(piece: tuple[Chunk, list[memoryview]], to: int = descriptor) -> Digest:
                return _write(to, *piece)

            cut = _cut(file, chunks)
            digests.update(zip(chunks, in_threads(write, cut), strict=True))
        finally:
            os.close(descriptor)
    by_path = tuple(sorted(entries, key=lambda entry: entry.path))
    return Manifest(by_path, tuple(digests[chunk] for chunk in chunk_layout(by_path))).encode()


def _cut(file: SnapshotFile, chunks: Sequence[Chunk]) -> Iterator[tuple[Chunk, list[memoryview]]]:
    """Each chunk of a file with the pieces of `parts` that it consists of."""
    parts = (memoryview(part).cast("B") for part in file.parts)
    left = memoryview(b"")
    for chunk in chunks:
        pieces, missing = list[memoryview](), chunk.length
        while missing:
            left = left or next((part for part in parts if len(part)), memoryview(b""))
            if not left:
                raise OperatorFault(f"{file.path}: expected {file.size} bytes; found fewer")
            pieces.append(left[:missing])
            left, missing = left[missing:], missing - len(pieces[-1])
        yield chunk, pieces
    if left or any(len(part) for part in parts):
        raise OperatorFault(f"{file.path}: expected {file.size} bytes; found more")


def _write(descriptor: int, chunk: Chunk, pieces: Sequence[memoryview]) -> Digest:
    digest, offset = blake3(), chunk.offset
    for piece in pieces:
        digest.update(piece)
    while pieces:
        # On Linux one system call writes at most 1024 buffers.
        written = os.pwritev(descriptor, pieces[:1000], offset)
        offset += written
        pieces = _after(pieces, written)
    return Digest(digest.digest())


def _after(pieces: Sequence[memoryview], written: int) -> Sequence[memoryview]:
    """The pieces that are not written yet."""
    for place, piece in enumerate(pieces):
        if written < len(piece):
            return [piece[written:], *pieces[place + 1 :]]
        written -= len(piece)
    return ()
