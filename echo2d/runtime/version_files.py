"""The coordinator's own copies of published snapshots, and of uploads that are still to be published.

    run_dir/versions/<version>-<random>/     one per accepted publish; the core says when it may go
    run_dir/uploads/<epoch>-<version>/       files put by a learner on another host

Only directories inside the snapshot root are taken, reached through no symbolic link. Blocking, except `upload`.
"""

import asyncio
import secrets
import shutil
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass
from pathlib import Path

from echo2d.core.ids import Digest, Epoch, Version
from echo2d.core.manifest import check_path
from echo2d.errors import IntegrityFault, OperatorFault
from echo2d.store.disk import store_faults
from echo2d.store.snapshots import adopt_snapshot, build_manifest

UPLOAD_BYTES_MAX = 256 << 30  # of one version: no form holds more
UPLOADS_MAX = 4  # versions under way; an older epoch's leftovers go first


@dataclass(frozen=True, slots=True)
class Adopted:
    """A snapshot in the run directory. path: relative to it."""

    path: str
    digest: Digest
    full_bytes: int


class VersionFiles:
    """Everything under versions/ and uploads/ of a run directory."""

    def __init__(self, run_dir: Path, snapshot_root: Path) -> None:
        self._run_dir = run_dir
        self._root = snapshot_root
        self._uploads = run_dir / "uploads"

    def prepare(self, kept: Collection[str]) -> None:
        """At start: delete what no published version needs. Uploads go on where they were."""
        with store_faults("preparing", self._run_dir):
            for folder in (self._run_dir / "versions", self._uploads):
                folder.mkdir(mode=0o700, exist_ok=True)
            for path in (self._run_dir / "versions").iterdir():
                if f"versions/{path.name}" not in kept:
                    shutil.rmtree(path, ignore_errors=True)
            for scratch in self._uploads.glob("*/.*"):
                scratch.unlink()

    def adopt(self, epoch: Epoch, version: Version, path: str | None) -> Adopted:
        """Take over the learner's directory, or (None) its upload, and hash it.

        OperatorFault: outside the snapshot root, or not a model directory.
        """
        source = self._upload_folder(epoch, version) if path is None else self._inside_root(Path(path))
        relative = f"versions/{version}-{secrets.token_hex(4)}"
        adopt_snapshot(source, self._run_dir / relative)
        try:
            manifest = build_manifest(self._run_dir / relative)
        except BaseException:
            self.delete(relative)
            raise
        if path is None:
            shutil.rmtree(source, ignore_errors=True)
        return Adopted(relative, manifest.digest, manifest.full_bytes)

    def delete(self, path: str) -> None:
        """`path`: as in Adopted."""
        shutil.rmtree(self._run_dir / path, ignore_errors=True)

    async def upload(self, epoch: Epoch, version: Version, name: str, data: AsyncIterator[bytes]) -> int:
        """Write one file; a second upload of the same file replaces the first. Its size."""
        try:
            check_path(name)
        except IntegrityFault as fault:
            raise OperatorFault(str(fault)) from fault
        folder = self._upload_folder(epoch, version)
        room = await asyncio.to_thread(self._make_room, folder, name)
        scratch = folder / f".{secrets.token_hex(4)}"
        try:
            size = await _write(scratch, data, room)
            await asyncio.to_thread(_move, scratch, folder / name)
        finally:
            await asyncio.to_thread(scratch.unlink, missing_ok=True)
        return size

    def _upload_folder(self, epoch: Epoch, version: Version) -> Path:
        return self._uploads / f"{epoch}-{version}"

    def _make_room(self, folder: Path, name: str) -> int:
        """Bytes that a file of this name may have."""
        with store_faults("uploading to", folder):
            folder.mkdir(exist_ok=True)
            others = sorted((path for path in self._uploads.iterdir() if path != folder), key=_age)
            for path in others[: max(0, len(others) + 1 - UPLOADS_MAX)]:
                shutil.rmtree(path, ignore_errors=True)
            used = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and path != folder / name)
            return max(0, UPLOAD_BYTES_MAX - used)

    def _inside_root(self, path: Path) -> Path:
        root = self._root.absolute()
        if not path.is_absolute() or ".." in path.parts or not path.is_relative_to(root) or path == root:
            raise OperatorFault(f"{path} is not a directory inside the snapshot root {root}")
        try:
            for part in (path, *path.parents):
                if part == root:
                    break
                if part.is_symlink():
                    raise OperatorFault(f"{part} is a symbolic link; publish the directory itself")
            if not path.is_dir():
                raise OperatorFault(f"{path} is not a directory")
        except OSError as error:  # a name that is too long, a folder that may not be searched
            raise OperatorFault(f"cannot look at a directory to publish: {error.strerror}") from error
        return path


def _age(path: Path) -> tuple[int, float]:
    """Of an upload folder: its epoch, and when it was written to."""
    return int(path.name.partition("-")[0]), path.stat().st_mtime


async def _write(path: Path, data: AsyncIterator[bytes], room: int) -> int:
    size = 0
    with store_faults("writing", path):
        file = await asyncio.to_thread(path.open, "xb")
        try:
            async for part in data:
                size += len(part)
                if size > room:
                    raise OperatorFault(f"an upload of one version is at most {UPLOAD_BYTES_MAX} bytes")
                await asyncio.to_thread(file.write, part)
        finally:
            await asyncio.to_thread(file.close)
    return size


def _move(source: Path, destination: Path) -> None:
    with store_faults("writing", destination):
        destination.parent.mkdir(exist_ok=True)
        source.replace(destination)
