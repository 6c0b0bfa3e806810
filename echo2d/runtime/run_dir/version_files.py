"""The coordinator's own copies of published snapshots, and of uploads that are still to be published.

    run_dir/versions/<version>-<random>/     one per accepted publish; the core says when it may go
    run_dir/uploads/<epoch>-<version>/       files put by a learner on another host

All of them together take at most `disk_bytes_max` bytes; what does not fit is refused. Only directories inside the
snapshot root are taken, reached through no symbolic link. An adapter must belong to the run's base model, if the
configuration names one. Blocking, except `upload`.
"""

import asyncio
import secrets
import shutil
from collections.abc import AsyncIterator, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from echo2d.adapters import base_digest, pinned_base
from echo2d.config import DISK_BYTES_MAX
from echo2d.core.base.bounded_dict import keep_newest
from echo2d.core.base.canonical import digest_of
from echo2d.core.base.ids import Digest, Epoch, Version
from echo2d.core.weights.manifest import Manifest, check_path
from echo2d.errors import IntegrityFault, OperatorFault, StoreFault
from echo2d.store.budget import DiskBudget
from echo2d.store.disk import store_faults
from echo2d.store.snapshots import adopt_snapshot, build_manifest, read_chunk, scan_snapshot

UPLOAD_BYTES_MAX = 256 << 30  # of one version: no form holds more
MANIFESTS_MAX = 4  # remembered: 32 B for 8 MiB of the newest versions
UPLOADS_MAX = 4  # versions under way; an older epoch's leftovers go first


@dataclass(frozen=True, slots=True)
class Adopted:
    """A snapshot in the run directory. path: relative to it."""

    path: str
    digest: Digest
    full_bytes: int


class VersionFiles:
    """Everything under versions/ and uploads/ of a run directory."""

    def __init__(
        self,
        run_dir: Path,
        snapshot_root: Path,
        disk_bytes_max: int = DISK_BYTES_MAX,
        *,
        base_model: Path | None = None,
    ) -> None:
        self._run_dir = run_dir
        self._base_model = base_model
        self._base_digest = ""  # of that; known once an adapter was published
        self._root = snapshot_root
        self._uploads = run_dir / "uploads"
        self._budget = DiskBudget(disk_bytes_max)
        self._manifests: dict[str, Manifest] = {}

    def prepare(self, kept: Collection[str]) -> frozenset[str]:
        """At start: delete what no published version needs. Uploads go on where they were. The paths that are gone."""
        with store_faults("preparing", self._run_dir):
            for folder in (self._run_dir / "versions", self._uploads):
                folder.mkdir(mode=0o700, exist_ok=True)
            for path in (self._run_dir / "versions").iterdir():
                if f"versions/{path.name}" not in kept:
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    self._budget.note(f"versions/{path.name}", _bytes_below(path))
            for scratch in self._uploads.glob("*/.*"):
                scratch.unlink()
            self._budget.note("uploads", _bytes_below(self._uploads))
            return frozenset(path for path in kept if not (self._run_dir / path).exists())

    def adopt(self, epoch: Epoch, version: Version, path: str | None) -> Adopted:
        """Take over the learner's directory, or (None) its upload, and hash it.

        OperatorFault: outside the snapshot root, not a model or adapter directory, or an adapter of another base model.
        StoreFault: no room for it.
        """
        source = (
            self._upload_folder(epoch, version) if path is None else self._inside_root(Path(path))
        )
        relative = f"versions/{version}-{secrets.token_hex(4)}"
        size = sum(file.size for file in scan_snapshot(source))
        self._check_base(source)
        if path is None:  # it is moved
            with store_faults("looking at", self._uploads):
                self._budget.note("uploads", _bytes_below(self._uploads) - size)
        self._budget.claim(relative, size)
        try:
            adopt_snapshot(source, self._run_dir / relative)
            manifest = build_manifest(self._run_dir / relative)
        except BaseException:
            self.delete(relative)
            raise
        if path is None:
            shutil.rmtree(source, ignore_errors=True)
        self._know(relative, manifest)
        return Adopted(relative, manifest.digest, manifest.full_bytes)

    def read(
        self, path: str, digest: Digest, names: Iterable[str], *, bytes_max: int
    ) -> dict[str, bytes]:
        """Those of these small files that the copy at `path` has, verified. After a start it is hashed whole, once.

        IntegrityFault: they are not what was published. OperatorFault, StoreFault: too large, or not readable.
        """
        directory = self._run_dir / path
        manifest = self._manifests.get(path) or self._know(path, build_manifest(directory))
        if manifest.digest != digest:
            raise IntegrityFault(f"{directory} is not what was published")
        wanted = {file.path: file.size for file in manifest.files if file.path in names}
        if sum(wanted.values()) > bytes_max:
            raise OperatorFault(
                f"{directory}: {', '.join(wanted)} have more than {bytes_max} bytes"
            )
        found = dict.fromkeys(wanted, b"")
        for chunk, right in zip(manifest.chunks, manifest.chunk_digests, strict=True):
            if chunk.path in found:
                data = read_chunk(directory, chunk)
                if digest_of(data) != right:
                    raise IntegrityFault(f"{directory / chunk.path} is not what was published")
                found[chunk.path] += data
        return found

    def _know(self, path: str, manifest: Manifest) -> Manifest:
        self._manifests[path] = manifest
        keep_newest(self._manifests, MANIFESTS_MAX)
        return manifest

    def delete(self, path: str) -> None:
        """`path`: as in Adopted."""
        shutil.rmtree(self._run_dir / path, ignore_errors=True)
        self._budget.note(path, 0)

    async def upload(
        self, epoch: Epoch, version: Version, name: str, data: AsyncIterator[bytes]
    ) -> int:
        """Write one file; a second upload of the same file replaces the first. Its size."""
        try:
            check_path(name)
        except IntegrityFault as fault:
            raise OperatorFault(str(fault)) from fault
        folder = self._upload_folder(epoch, version)
        room = await asyncio.to_thread(self._make_room, folder, name)
        scratch = folder / f".{secrets.token_hex(4)}"
        try:
            size = await _write(scratch, data, room, self._budget.left)
            await asyncio.to_thread(_move, scratch, folder / name)
        finally:
            await asyncio.to_thread(scratch.unlink, missing_ok=True)
        return size

    def _check_base(self, source: Path) -> None:
        pinned = pinned_base(source)
        if pinned is None or self._base_model is None:
            return
        self._base_digest = self._base_digest or base_digest(self._base_model)
        if pinned != self._base_digest:
            raise OperatorFault(
                f"the adapter belongs to base model {pinned[:12]}; run.base_model is {self._base_digest[:12]}"
            )

    def _upload_folder(self, epoch: Epoch, version: Version) -> Path:
        return self._uploads / f"{epoch}-{version}"

    def _make_room(self, folder: Path, name: str) -> int:
        """Bytes that a file of this name may have."""
        with store_faults("uploading to", folder):
            folder.mkdir(exist_ok=True)
            others = sorted((path for path in self._uploads.iterdir() if path != folder), key=_age)
            for path in others[: max(0, len(others) + 1 - UPLOADS_MAX)]:
                shutil.rmtree(path, ignore_errors=True)
            used = sum(
                path.stat().st_size for path in _files_below(folder) if path != folder / name
            )
            self._budget.note("uploads", _bytes_below(self._uploads))
            return max(0, UPLOAD_BYTES_MAX - used)

    def _inside_root(self, path: Path) -> Path:
        root = self._root.absolute()
        if (
            not path.is_absolute()
            or ".." in path.parts
            or not path.is_relative_to(root)
            or path == root
        ):
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
            raise OperatorFault(
                f"cannot look at a directory to publish: {error.strerror}"
            ) from error
        return path


def _age(path: Path) -> tuple[int, float]:
    """Of an upload folder: its epoch, and when it was written to."""
    return int(path.name.partition("-")[0]), path.stat().st_mtime


def _files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def _bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in _files_below(folder))


async def _write(path: Path, data: AsyncIterator[bytes], room: int, left: int) -> int:
    """room: what the version may still have; left: what the disk may still hold."""
    size = 0
    with store_faults("writing", path):
        file = await asyncio.to_thread(path.open, "xb")
        try:
            async for part in data:
                size += len(part)
                if size > room:
                    raise OperatorFault(
                        f"an upload of one version is at most {UPLOAD_BYTES_MAX} bytes"
                    )
                if size > left:
                    raise StoreFault(
                        f"run.disk_bytes_max: {left} bytes are left for {path.parent}", full=True
                    )
                await asyncio.to_thread(file.write, part)
        finally:
            await asyncio.to_thread(file.close)
    return size


def _move(source: Path, destination: Path) -> None:
    with store_faults("writing", destination):
        destination.parent.mkdir(exist_ok=True)
        source.replace(destination)
