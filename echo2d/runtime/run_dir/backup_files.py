"""The files of a run's backup, their digests, and the manifest that names them.

    BACKUP/ (0700)   manifest.json    format, facts about the run, and size and digest of every file
                     run/             from the run directory: key, access table, tokens, ledger, versions
                     learner/         from learner.out_dir: identity, metrics, checkpoints

Every byte is hashed when it is written and when it is read back. Not here: which files are taken, and
in which order (`backup`), and how a run is restored from them (`restore`).
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

from blake3 import blake3

from echo2d.errors import IntegrityFault, OperatorFault
from echo2d.store.disk import allocate, opened, read_at, replace_file, store_faults, sync
from echo2d.store.formats import require_format
from echo2d.store.sealed import sealed, unsealed

_FORMAT = 2
BACKUP_MANIFEST = "manifest.json"
RUN, BACKUP_PARTS = "run", "learner"

ToldBytes = Callable[[int], None]  # gets the number of bytes that are done


@dataclass(frozen=True, slots=True)
class BackupFile:
    """One file. path: relative to the backup. digest: blake3, hex."""

    path: str
    size: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BackupFacts:
    """The facts about a backup."""

    run_id: str
    made_at: float  # Unix time
    host: str
    source: str  # the run directory
    step: int  # the last committed one
    checkpoint: int | None  # the step of the newest checkpoint in it; None: it has none
    files: tuple[BackupFile, ...]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


def write_manifest(folder: Path, facts: BackupFacts) -> None:
    data = sealed({"format": _FORMAT, **asdict(facts)}, indent=1)
    replace_file(folder / BACKUP_MANIFEST, data, durable=True)
    (folder / BACKUP_MANIFEST).chmod(0o600)


def read_manifest(folder: Path) -> BackupFacts:
    """The facts in the manifest. OperatorFault: this is not a backup, or it has another format."""
    path = folder / BACKUP_MANIFEST
    if not path.is_file():
        raise OperatorFault(f"{folder} is not a backup: it has no {BACKUP_MANIFEST}")
    try:
        with store_faults("reading", path):
            # The manifest of a backup with a hundred thousand files fits into 64 MiB.
            document = read_at(path, 64 << 20, 0)
        older = "restore it with the echo2d that made it"
        require_format(f"backup {folder}", json.loads(document)["format"], _FORMAT, older=older)
        found = unsealed(document)
        del found["format"]
        files = tuple(BackupFile(**each) for each in found.pop("files"))
        for file in files:
            _check(file)
        return BackupFacts(files=files, **found)
    except (ValueError, TypeError, KeyError, AttributeError, IntegrityFault) as error:
        raise OperatorFault(f"{path} is damaged") from error


def copy_file(
    source: Path | int, target: Path, tell: ToldBytes, *, size: int | None = None
) -> BackupFile:
    """Copy a file into a new private one, durably. source: its path, or a descriptor at its beginning.
    size: copy at most this many bytes. Returns its size and digest, with an empty path. Raises OSError.
    """
    make_private(target.parent)
    allocate(target, 0)
    digest, done, unsynced = blake3(), 0, 0
    with opened(target, os.O_WRONLY) as fd:
        for part in _parts(source, size):
            digest.update(part)
            view = memoryview(part)
            while len(view):
                view = view[os.write(fd, view) :]
            done += len(part)
            unsynced += len(part)
            # The file is synced every 32 MiB, so that the ledger's commits never wait for a long queue
            # of these writes.
            if unsynced >= 32 << 20:
                os.fdatasync(fd)
                unsynced = 0
            tell(len(part))
        os.fsync(fd)
    return BackupFile("", done, digest.hexdigest())


def make_private(folder: Path) -> None:
    """Make a folder, and those above it that are missing."""
    if not folder.exists():
        make_private(folder.parent)
        folder.mkdir(mode=0o700)


def hash_file(path: Path, tell: ToldBytes) -> BackupFile:
    """The size and digest of a file, with an empty path. Raises OSError."""
    digest, done = blake3(), 0
    for part in _parts(path, None):
        digest.update(part)
        done += len(part)
        tell(len(part))
    return BackupFile("", done, digest.hexdigest())


def verify(folder: Path, tell: Callable[[float], None]) -> BackupFacts:
    """Read a whole backup. IntegrityFault: a file is missing or damaged. tell: gets the share done."""
    facts, progress = read_manifest(folder), CopyProgress(tell)
    progress.of = facts.size
    with store_faults("reading the backup", folder):
        for file in facts.files:
            check_copy(folder, file, hash_or_none(folder / file.path, progress.add))
    return facts


def hash_or_none(path: Path, tell: ToldBytes) -> BackupFile | None:
    try:
        return hash_file(path, tell)
    except FileNotFoundError:
        return None


def check_copy(folder: Path, file: BackupFile, found: BackupFile | None) -> None:
    """IntegrityFault: the file that was found is not this file of the backup."""
    if found is None:
        raise IntegrityFault(f"the backup {folder} lacks {file.path}")
    if (found.size, found.digest) != (file.size, file.digest):
        raise IntegrityFault(f"the backup {folder} is damaged: {file.path} is not what was written")


def sync_folders(folder: Path) -> None:
    """Make the names of all files below a folder durable."""
    for path, _, _ in os.walk(folder):
        sync(Path(path))


class CopyProgress:
    """Counts bytes, and reports their share of `of`, the number of all bytes, which is set once it is known."""

    def __init__(self, tell: Callable[[float], None]) -> None:
        self._tell, self._done, self.of = tell, 0, 0

    def add(self, count: int) -> None:
        self._done += count
        self._tell(min(1.0, self._done / max(1, self.of)))


def _parts(source: Path | int, size: int | None) -> Iterator[bytes]:
    left = float("inf") if size is None else size
    with nullcontext(source) if isinstance(source, int) else opened(source, os.O_RDONLY) as fd:
        # 4 MiB are read, hashed and written at a time.
        while left > 0 and (part := os.read(fd, int(min(4 << 20, left)))):
            left -= len(part)
            yield part


def _check(file: BackupFile) -> None:
    parts = file.path.split("/")
    if parts[0] not in (RUN, BACKUP_PARTS) or any(part in ("", ".", "..") for part in parts):
        raise IntegrityFault(f"{file.path!r} is not a path in a backup")
    if type(file.size) is not int or file.size < 0 or type(file.digest) is not str:
        raise IntegrityFault(f"{file.path!r} has no size and digest")
