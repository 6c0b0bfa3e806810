"""Describes a snapshot: its files, their chunks, and the digest of each chunk. All forms of a version
share it.

    files, sorted by path; each part is cut into chunks of at most CHUNK_BYTES
      x.safetensors   | header [0, 8+N) | data section |
      others          | the whole file                 |
    chunk 0, 1, 2 ... = these pieces in order

The *snapshot digest* is the blake3-256 of the manifest's canonical encoding, and so covers file
names, sizes and all bytes. Wrong files or bytes are an `IntegrityFault`. Not here: forms and frames
(`form`), reading files (`store.snapshots`).
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from echo2d.core.base.canonical import canonical_unpacker, digest_of
from echo2d.core.base.codec import pack
from echo2d.core.base.ids import DIGEST_BYTES, SEGMENTS_MAX, Digest
from echo2d.core.weights.safetensors_header import HEADER_BYTES_MAX, LENGTH_BYTES
from echo2d.errors import IntegrityFault

CHUNK_BYTES = 8 << 20
# The largest public models have about 200 shards. The list of files must fit into one table.
SNAPSHOT_FILES_MAX = 1024
PATH_PART_CHARS_MAX = 128  # half of what file systems allow: room for suffixes of temporary files
# A full segment has between 56 and 64 MiB, and at most SMALL_SEGMENTS_MAX smaller segments come
# before the first full one. So any form of a snapshot of SNAPSHOT_BYTES_MAX fits into SEGMENTS_MAX.
SMALL_SEGMENTS_MAX = 64
SNAPSHOT_BYTES_MAX = (SEGMENTS_MAX - SMALL_SEGMENTS_MAX) * (56 << 20)
# The header and the data section of each file may end in a short chunk.
CHUNKS_MAX = SNAPSHOT_BYTES_MAX // CHUNK_BYTES + 2 * SNAPSHOT_FILES_MAX
_MANIFEST_BYTES_MAX = CHUNKS_MAX * DIGEST_BYTES + SNAPSHOT_FILES_MAX * (
    2 * PATH_PART_CHARS_MAX + 32
)
_SUFFIXES = (".safetensors", ".json", ".txt", ".model", ".jinja")
# The names that Hugging Face PEFT uses.
ADAPTER_CONFIG, ADAPTER_WEIGHTS = ("adapter_config.json", "adapter_model.safetensors")
BASE_PIN = "base.json"  # names the base model that an adapter belongs to
MODEL_FILES = ("config.json", "tokenizer.json")  # required in every model that is not an adapter
ADAPTER_FILES = (ADAPTER_CONFIG, ADAPTER_WEIGHTS, BASE_PIN)

_PATH_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_FORMAT: Literal["echo2d-manifest-1"] = "echo2d-manifest-1"


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file."""

    path: str  # relative, "/" between parts
    size: int
    header_bytes: int  # 8 + N for safetensors, 0 for all others


@dataclass(frozen=True, slots=True)
class Chunk:
    """The bytes [offset, offset + length) of the file at `path`."""

    path: str
    offset: int
    length: int


def is_safetensors(path: str) -> bool:
    return path.endswith(".safetensors")


def check_path(path: str) -> None:
    """Check a file name: plain parts, at most one folder deep, only data files (no code, no pickles)."""
    parts = path.split("/")
    plain = all(len(part) <= PATH_PART_CHARS_MAX and _PATH_PART.fullmatch(part) for part in parts)
    if len(parts) > 2 or not plain:
        raise IntegrityFault(f"forbidden file name {path[:300]!r}")
    if not path.endswith(_SUFFIXES):
        raise IntegrityFault(
            f"forbidden file {path!r}: a snapshot holds only {' '.join(_SUFFIXES)}"
        )


def _check_size(file: FileEntry) -> None:
    smallest, largest = (
        (LENGTH_BYTES, LENGTH_BYTES + HEADER_BYTES_MAX) if is_safetensors(file.path) else (0, 0)
    )
    if not smallest <= file.header_bytes <= largest or not file.header_bytes <= file.size:
        raise IntegrityFault(
            f"{file.path}: impossible size {file.size} or header size {file.header_bytes}"
        )


def check_files(files: Sequence[FileEntry]) -> None:
    """Check that names are allowed, sorted and unique, no file is also a folder, sizes are in range."""
    if len(files) > SNAPSHOT_FILES_MAX:
        raise IntegrityFault(f"{len(files)} files; at most {SNAPSHOT_FILES_MAX} are allowed")
    for file in files:
        check_path(file.path)
        _check_size(file)
    paths = [file.path for file in files]
    if paths != sorted(set(paths)):
        raise IntegrityFault("file names must be sorted, and each name unique")
    folders = {path.split("/")[0] for path in paths if "/" in path}
    if not folders.isdisjoint(paths):
        raise IntegrityFault("a file and a folder have the same name")
    if not 0 < sum(file.size for file in files) <= SNAPSHOT_BYTES_MAX:
        raise IntegrityFault(f"a snapshot has between 1 and {SNAPSHOT_BYTES_MAX} bytes")


def _pieces(path: str, start: int, stop: int) -> Iterator[Chunk]:
    for offset in range(start, stop, CHUNK_BYTES):
        yield Chunk(path, offset, min(CHUNK_BYTES, stop - offset))


def chunk_layout(files: Sequence[FileEntry]) -> tuple[Chunk, ...]:
    """Return all chunks in order; a chunk's position is its ChunkId."""
    return tuple(
        piece
        for file in files
        for start, stop in ((0, file.header_bytes), (file.header_bytes, file.size))
        for piece in _pieces(file.path, start, stop)
    )


@dataclass(frozen=True, slots=True)
class _Record:
    """The fields of a manifest's canonical encoding."""

    format: Literal["echo2d-manifest-1"]
    files: tuple[FileEntry, ...]
    chunk_digests: bytes


_unpack = canonical_unpacker(_Record, bytes_max=_MANIFEST_BYTES_MAX)


@dataclass(frozen=True, slots=True)
class Manifest:
    """A snapshot's files and the blake3-256 of each chunk. A manifest is checked when it is made."""

    files: tuple[FileEntry, ...]
    chunk_digests: tuple[Digest, ...]

    def __post_init__(self) -> None:
        check_files(self.files)
        if len(self.chunk_digests) != len(self.chunks):
            raise IntegrityFault(
                f"{len(self.chunk_digests)} chunk digests for {len(self.chunks)} chunks"
            )
        if any(len(digest) != DIGEST_BYTES for digest in self.chunk_digests):
            raise IntegrityFault(f"a chunk digest is not {DIGEST_BYTES} bytes long")

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        return chunk_layout(self.files)

    @property
    def full_bytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def digest(self) -> Digest:
        """The snapshot digest."""
        return digest_of(self.encode())

    def encode(self) -> bytes:
        return pack(_Record(_FORMAT, self.files, b"".join(self.chunk_digests)))

    @staticmethod
    def decode(data: bytes) -> "Manifest":
        record = _unpack(data)
        return Manifest(record.files, split_digests(record.chunk_digests))


def split_digests(joined: bytes) -> tuple[Digest, ...]:
    """Split concatenated digests. IntegrityFault: the last one is incomplete."""
    if len(joined) % DIGEST_BYTES:
        raise IntegrityFault(f"{len(joined)} bytes are not whole digests of {DIGEST_BYTES} bytes")
    return tuple(
        Digest(joined[start : start + DIGEST_BYTES])
        for start in range(0, len(joined), DIGEST_BYTES)
    )
