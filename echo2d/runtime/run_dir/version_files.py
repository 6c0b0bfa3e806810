"""The coordinator's own copies of published snapshots, and uploads that are not yet published.

    run_dir/versions/<version>-<random>/   one per accepted publish; the core decides on deletion
    run_dir/uploads/<epoch>-<version>/     files uploaded by a learner on another host
    run_dir/synced/                        which versions survive a power failure

A publish does not wait for the disk (`synced_copies.py`). If the learner sends the digests that it made
while it wrote, a publish does not wait for hashing either: the seed reads all files anyway, and reports
a difference.
All files together take at most `disk_bytes_max` bytes; a version that does not fit is refused.
A published directory must lie inside the snapshot root, with no symbolic link on the way. An
adapter must belong to the run's base model, if the configuration names one. All methods block,
except `upload`.
"""

import asyncio
import logging
import secrets
import shutil
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from echo2d.adapters import base_digest, pinned_base
from echo2d.config.limits import DISK_BYTES_MAX
from echo2d.core.base.bounded_dict import keep_newest
from echo2d.core.base.canonical import digest_of
from echo2d.core.base.ids import Digest, Epoch, Version
from echo2d.core.weights.manifest import Manifest, check_path
from echo2d.errors import Fault, IntegrityFault, OperatorFault, StoreFault, path_fault
from echo2d.runtime.run_dir.synced_copies import SyncedCopies
from echo2d.store.budget import DiskBudget
from echo2d.store.disk import store_faults
from echo2d.store.snapshots import adopt_snapshot, build_manifest, read_chunk, scan_snapshot
from echo2d.texts.files import token_files

# An upload has at most this many bytes: as many as the largest form of a version.
UPLOAD_BYTES_MAX = 256 << 30
# At most this many versions are uploaded at a time. Leftovers of older epochs are deleted first.
UPLOADS_MAX = 4

log = logging.getLogger("echo2d.coordinator")


@dataclass(frozen=True, slots=True)
class Adopted:
    """A snapshot in the run directory."""

    path: str  # relative to the run directory
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
        # Computed only when the first adapter is published, because it takes a read of the whole base model.
        self._base_digest = ""
        self._root = snapshot_root
        self._versions = run_dir / "versions"
        self._uploads = run_dir / "uploads"
        self._synced = SyncedCopies(self._versions, run_dir / "synced")
        self.bytes_max = disk_bytes_max
        self._budget = DiskBudget(disk_bytes_max)
        self._manifests: dict[str, Manifest] = {}
        # The base model's files that turn text into tokens, if the run has a task in text.
        self._texts: dict[str, bytes] = {}

    def pin_texts(self, model: Path) -> None:
        """Refuse versions whose tokenizer or chat template is not this model's. Prompts are made with the
        model's files, so for such a version they would be wrong.

        OperatorFault: a file cannot be read.
        """
        self._texts = token_files(model)

    def prepare(self, kept: Mapping[str, Digest]) -> frozenset[str]:
        """Delete the files that no published version needs. Call it once, at the start.

        kept: the published snapshot of each path. Copies that a power failure may have damaged are
        hashed, and deleted if they are damaged. Uploads can be continued. Returns the paths of `kept`
        that no longer have files.
        """
        with store_faults("preparing", self._run_dir):
            for folder in (self._versions, self._uploads):
                folder.mkdir(mode=0o700, exist_ok=True)
            for path in self._versions.iterdir():
                if f"versions/{path.name}" not in kept:
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    self._budget.note(f"versions/{path.name}", _bytes_below(path))
            self._delete_damaged(kept)
            # A file is renamed from its scratch name when it is complete.
            for scratch in self._uploads.glob("*/.*"):
                scratch.unlink()
            self._budget.note("uploads", _bytes_below(self._uploads))
            return frozenset(path for path in kept if not (self._run_dir / path).exists())

    def _delete_damaged(self, kept: Mapping[str, Digest]) -> None:
        names = {path.name: path for path in map(self._run_dir.joinpath, kept) if path.exists()}
        for name in self._synced.suspects(names):
            log.info("hashing %s, which was not synced before the machine went down", name)
            path = f"versions/{name}"
            if _digest_in(self._versions / name) != kept[path]:
                log.warning("%s was damaged when the machine went down, and is deleted", name)
                self.delete(path)
        self._synced.none_is_damaged()

    def adopt(
        self, epoch: Epoch, version: Version, path: str | None, manifest: Manifest | None = None
    ) -> Adopted:
        """Adopt the learner's directory, or its upload if `path` is None.

        manifest: the learner's manifest of the directory; None: the files are hashed. Here only the
        names and sizes of the files are compared with it.

        OperatorFault: the path is outside the snapshot root, is not a model or adapter directory, has
        an adapter of another base model, another tokenizer, or other files than `manifest`.
        StoreFault: there is no room for it.
        """
        source = (
            self._upload_folder(epoch, version) if path is None else self._inside_root(Path(path))
        )
        relative = f"versions/{version}-{secrets.token_hex(4)}"
        files = scan_snapshot(source)
        if manifest is not None and manifest.files != files:
            raise OperatorFault(
                f"version {version}: the manifest has other files than {source}, or other sizes; "
                "publish without a manifest to have the files hashed"
            )
        size = sum(file.size for file in files)
        self._check_base(source)
        self._check_texts(source, version)
        # An upload is moved, not copied, so its bytes must not be counted twice.
        if path is None:
            with store_faults("looking at", self._uploads):
                self._budget.note("uploads", _bytes_below(self._uploads) - size)
        self._budget.claim(relative, size)
        try:
            adopt_snapshot(source, self._run_dir / relative)
            manifest = manifest or build_manifest(self._run_dir / relative)
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
        """Read small files of the copy at `path`, verified; `names` that it lacks are left out.

        The copy is hashed whole first if its manifest is not in memory, as after a restart.
        IntegrityFault: the files are not those that were published. OperatorFault: together they
        have more than `bytes_max` bytes. StoreFault: they cannot be read.
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

    def is_synced(self, path: str) -> bool:
        """Whether a copy survives a power failure. path: as in `Adopted`."""
        return self._synced.has(_name_in(path))

    def sync(self, path: str, digest: Digest) -> bool:
        """Make a copy survive a power failure. path: as in `Adopted`. This waits for the disk.

        The copy is hashed first, because the seed has not read it if the version was never sent. A copy
        that is not the snapshot `digest` is deleted. False: the copy no longer exists.
        """
        copy = self._run_dir / path
        if self.is_synced(path):
            return True
        try:
            whole = build_manifest(copy).digest == digest
            if whole:
                self._synced.sync(_name_in(path))
        except Fault as fault:
            log.warning("%s", fault)
            if isinstance(fault, StoreFault) or isinstance(fault.__cause__, OSError):
                # The copy cannot be read now, or was deleted meanwhile.
                return copy.exists()
            whole = False
        if not whole:
            log.warning("%s is not what was published, and is deleted", path)
            self.delete(path)
        return whole

    def _know(self, path: str, manifest: Manifest) -> Manifest:
        self._manifests[path] = manifest
        # Keep the manifests of the 4 newest versions in memory. Each takes 32 B per 8 MiB of its version.
        keep_newest(self._manifests, 4)
        return manifest

    def delete(self, path: str) -> None:
        """Delete an adopted version. Its name disappears at once. path: as in `Adopted`."""
        directory = self._run_dir / path
        # If a kill interrupts this, `prepare` deletes the rest.
        aside = directory.with_name(f"{directory.name}.gone")
        with suppress(OSError):
            directory.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)
        shutil.rmtree(directory, ignore_errors=True)
        self._synced.forget(directory.name)
        self._budget.note(path, 0)

    async def upload(
        self, epoch: Epoch, version: Version, name: str, data: AsyncIterator[bytes]
    ) -> int:
        """Write one file, replacing an earlier upload of it. Returns its size in bytes.

        OperatorFault: the name is not allowed, or the version is too large. StoreFault: the disk
        is full or fails.
        """
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

    def _check_texts(self, source: Path, version: Version) -> None:
        """OperatorFault: a file of the directory differs from the pinned one. Files may be missing."""
        found = token_files(source) if self._texts else {}
        for name, pinned in self._texts.items():
            if found.get(name, pinned) != pinned:
                raise OperatorFault(
                    f"version {version} has another {name} than run.base_model; publish the base "
                    "model's file with it"
                )

    def _check_base(self, source: Path) -> None:
        """OperatorFault: the directory holds an adapter of another base model."""
        pinned = pinned_base(source)
        if pinned is None or self._base_model is None:
            return
        self._base_digest = self._base_digest or base_digest(self._base_model)
        if pinned != self._base_digest:
            raise OperatorFault(
                f"the adapter belongs to base model {pinned[:12]}; "
                f"run.base_model is {self._base_digest[:12]}"
            )

    def _upload_folder(self, epoch: Epoch, version: Version) -> Path:
        return self._uploads / f"{epoch}-{version}"

    def _make_room(self, folder: Path, name: str) -> int:
        """Delete the oldest leftovers. Returns how many bytes a file of this name may have."""
        with store_faults("uploading to", folder):
            folder.mkdir(exist_ok=True)
            others = sorted((path for path in self._uploads.iterdir() if path != folder), key=_age)
            # Learners of older epochs are fenced, and will not continue their uploads.
            over = [path for path in others if _age(path)[0] < _age(folder)[0]]
            for path in {*over, *others[: max(0, len(others) + 1 - UPLOADS_MAX)]}:
                shutil.rmtree(path, ignore_errors=True)
            used = sum(
                path.stat().st_size for path in _files_below(folder) if path != folder / name
            )
            self._budget.note("uploads", _bytes_below(self._uploads))
            return max(0, UPLOAD_BYTES_MAX - used)

    def _inside_root(self, path: Path) -> Path:
        """Check a path that the learner gave, which may be hostile. OperatorFault: refused."""
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
        except OSError as error:
            # The name is too long, or there is no permission to search a folder.
            raise path_fault("cannot read the directory to publish", error) from error
        return path


def _name_in(path: str) -> str:
    return path.removeprefix("versions/")


def _digest_in(directory: Path) -> Digest | None:
    """The digest of the snapshot in a directory; None: it cannot be read, or is no snapshot."""
    try:
        return build_manifest(directory).digest
    except Fault:
        return None


def _age(path: Path) -> tuple[int, float]:
    """The age of an upload folder: its epoch, then the time when it was last written."""
    return int(path.name.partition("-")[0]), path.stat().st_mtime


def _files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def _bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in _files_below(folder))


async def _write(path: Path, data: AsyncIterator[bytes], room: int, left: int) -> int:
    """Write a file. Returns its size.

    room: bytes that its version may still have. left: bytes that the disk may still hold.
    """
    size = 0
    with store_faults("writing", path):
        file = await asyncio.to_thread(path.open, "xb")
        try:
            async for part in data:
                size += len(part)
                if size > room:
                    raise OperatorFault(
                        f"the upload of one version: expected at most {UPLOAD_BYTES_MAX} bytes"
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
