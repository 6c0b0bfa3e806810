"""Read snapshot directories: scan their files, build their manifest, read their chunks, and adopt
(link or copy) them.

A snapshot directory holds a whole model, or a LoRA adapter that names its base model
(`echo2d/adapters.py`). It has plain files only, at most one folder deep, with the names that
`manifest.check_path` allows. Anything else is an `OperatorFault` of one line, because a person or
the learner put it there. Blocking functions.
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from echo2d.core.base.canonical import digest_of, require
from echo2d.core.base.ids import ChunkId, Digest
from echo2d.core.weights.manifest import (
    ADAPTER_CONFIG,
    ADAPTER_FILES,
    CHUNK_BYTES,
    MODEL_FILES,
    Chunk,
    FileEntry,
    Manifest,
    check_files,
    check_path,
    chunk_layout,
    is_safetensors,
)
from echo2d.core.weights.safetensors_header import LENGTH_BYTES, check_header, header_bytes
from echo2d.errors import IntegrityFault, OperatorFault, StoreFault, path_fault
from echo2d.store.disk import opened, read_at, read_into, store_faults, sync
from echo2d.threads import Buffers, in_threads


def scan_snapshot(directory: Path) -> tuple[FileEntry, ...]:
    """Return the files of a model or adapter directory sorted by path, after checks of names and
    safetensors headers. OperatorFault: it is not such a directory. StoreFault: this host cannot read
    it now.
    """
    try:
        files = tuple(
            sorted(
                (_entry(directory, path) for path in _paths(directory)), key=lambda file: file.path
            )
        )
        check_files(files)
    except OSError as error:
        raise path_fault(f"snapshot {directory} cannot be read", error) from error
    except IntegrityFault as fault:
        raise OperatorFault(f"snapshot {directory}: {fault}") from fault
    _check_kind(directory, [file.path for file in files])
    return files


def build_manifest(directory: Path, progress: Callable[[int], None] | None = None) -> Manifest:
    """Hash a model directory into a manifest, in a few threads. progress: called with the number of
    bytes hashed so far.
    """
    files, digests, done = scan_snapshot(directory), [], 0
    chunks, buffers = chunk_layout(files), Buffers(CHUNK_BYTES)

    def hashed(chunk: Chunk) -> Digest:
        with buffers.one() as buffer:
            return digest_of(read_chunk_into(directory, chunk, buffer))

    for chunk, digest in zip(chunks, in_threads(hashed, chunks), strict=True):
        digests.append(digest)
        done += chunk.length
        if progress is not None:
            progress(done)
    return Manifest(files, tuple(digests))


def read_chunk(directory: Path, chunk: Chunk) -> bytes:
    """Read a chunk. IntegrityFault: the file is too short."""
    path = directory / chunk.path
    with store_faults("reading", path):
        data = read_at(path, chunk.length, chunk.offset)
    require(len(data) == chunk.length, f"{path} is shorter than its manifest says")
    return data


def read_chunk_into(directory: Path, chunk: Chunk, buffer: memoryview) -> memoryview:
    """Read a chunk into the beginning of `buffer`, which must be large enough, and return that part
    of it.
    """
    path, data = directory / chunk.path, buffer[: chunk.length]
    with store_faults("reading", path):
        length = read_into(path, data, chunk.offset)
    require(length == chunk.length, f"{path} is shorter than its manifest says")
    return data


def damaged_chunks(
    directory: Path, manifest: Manifest, among: Sequence[ChunkId] | None = None
) -> tuple[ChunkId, ...]:
    """Return the chunks whose bytes do not match the manifest. Reads and hashes all, or those
    `among`, in a few threads.
    """
    chunks, buffers = manifest.chunks, Buffers(CHUNK_BYTES)
    positions = range(len(chunks)) if among is None else among

    def hashed(position: int) -> Digest:
        with buffers.one() as buffer:
            try:
                return digest_of(read_chunk_into(directory, chunks[position], buffer))
            except (IntegrityFault, StoreFault):
                return digest_of(b"")

    return tuple(
        ChunkId(position)
        for position, digest in zip(positions, in_threads(hashed, positions), strict=True)
        if digest != manifest.chunk_digests[position]
    )


def adopt_snapshot(source: Path, destination: Path) -> tuple[FileEntry, ...]:
    """Take over a model directory by hard links, or copies where links are not possible, in one
    atomic step. Nothing is synced.

    `destination` must not exist, and does not exist after a fault or a kill. Later writes *into*
    files of the source would show through the links, so publishers must write new files. Returns
    the files, checked in their new place.
    """
    files = scan_snapshot(source)
    scratch = destination.with_name(destination.name + ".new")
    with store_faults("adopting a snapshot as", destination):
        if destination.exists():
            raise StoreFault(f"{destination} exists already")
        shutil.rmtree(scratch, ignore_errors=True)
        try:
            for file in files:
                _take(source / file.path, scratch / file.path)
            adopted = scan_snapshot(scratch)
            scratch.rename(destination)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return adopted


def sync_snapshot(directory: Path, files: Sequence[FileEntry]) -> None:
    """Make the files and their folders durable. Raises OSError, for the caller to translate."""
    paths = [directory / file.path for file in files]
    for path in (*paths, *sorted({path.parent for path in paths} | {directory})):
        sync(path)


def leave_page_cache(directory: Path) -> None:
    """Ask the kernel to drop its cached pages of these files. It keeps those that are not on the disk yet.

    The next reader then reads the files from the disk. Errors are ignored.
    """
    with contextlib.suppress(OSError, IntegrityFault):
        for path in _paths(directory):
            with opened(directory / path, os.O_RDONLY) as fd:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _paths(directory: Path, prefix: str = "") -> Iterator[str]:
    """Yield the relative paths of all files. IntegrityFault: an entry does not belong in a snapshot."""
    with os.scandir(directory) as entries:
        for entry in entries:
            path = prefix + entry.name
            if entry.is_file(follow_symlinks=False):
                check_path(path)
                yield path
            elif entry.is_dir(follow_symlinks=False) and not prefix:
                yield from _paths(directory / entry.name, entry.name + "/")
            elif entry.is_symlink():
                raise IntegrityFault(
                    f"{path!r} is a symbolic link; a snapshot holds plain files (copy with cp -rL)"
                )
            else:
                raise IntegrityFault(
                    f"{path!r} is neither a plain file nor a folder of plain files"
                )


def _entry(directory: Path, path: str) -> FileEntry:
    size = (directory / path).lstat().st_size
    if not is_safetensors(path):
        return FileEntry(path, size, 0)
    try:
        header = header_bytes(read_at(directory / path, LENGTH_BYTES, 0), size)
        check_header(read_at(directory / path, header, 0), size)
    except IntegrityFault as fault:
        raise IntegrityFault(f"{path}: {fault}") from fault
    return FileEntry(path, size, header)


def _check_kind(directory: Path, paths: Sequence[str]) -> None:
    if ADAPTER_CONFIG in paths and "config.json" in paths:
        raise OperatorFault(
            f"snapshot {directory} has config.json and {ADAPTER_CONFIG}: a model, or an adapter?"
        )
    for required in ADAPTER_FILES if ADAPTER_CONFIG in paths else MODEL_FILES:
        if required not in paths:
            raise OperatorFault(f"snapshot {directory} has no {required}")
    if not any(map(is_safetensors, paths)):
        raise OperatorFault(f"snapshot {directory} has no .safetensors file")


def _take(source: Path, destination: Path) -> None:
    destination.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, destination, follow_symlinks=False)
    except OSError:
        # A link is not possible to another file system, to a file of another user, or after too many links.
        shutil.copyfile(source, destination, follow_symlinks=False)
