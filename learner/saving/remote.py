"""Copies of checkpoints under a URL of fsspec, for hosts that may lose their disk.

    s3://bucket/folder/
        learner.id                 the learner's identity (`identity`)
        step-00000010-epoch-3/     the files of a checkpoint, digests.blake3 last

Invariant: a directory without digests.blake3 is not a checkpoint, so a copy is whole or does not count,
whatever ends the copying. A download is verified before it gets its name on the disk.

A call that fails is tried again for about 16 s in all (`PAUSES_S`). fsspec and the library behind the URL find
credentials and endpoints in their own environment variables and files.
"""

import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from blake3 import blake3

from echo2d.client import OperatorFault, StoreFault
from echo2d.extras import install_command
from echo2d.learner.saving.files import store_faults, whole_directory
from echo2d.learner.saving.identity import DAY_FILE, ID_FILE

DIGESTS = "digests.blake3"
# Seconds before each further try: 16 s in all. Within this time a service that restarts or throttles answers
# again, and a learner that was told to stop does not have much more time.
PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)
# Errors that another try would not change.
_LASTING = (
    FileNotFoundError,
    PermissionError,
    ImportError,
    NotImplementedError,
    TypeError,
    ValueError,
)

_T = TypeVar("_T")

log = logging.getLogger("echo2d.learner")


class RemoteCheckpoints:
    """The checkpoints under a URL. Every method but `__init__` raises StoreFault if the storage
    cannot be reached.
    """

    def __init__(self, url: str) -> None:
        """OperatorFault: fsspec, or the package that it needs for this URL, is missing."""
        self.url = url.rstrip("/")
        self._has_identity = False
        try:
            from fsspec.core import url_to_fs
        except ImportError as error:
            raise OperatorFault(
                f"learner.checkpoint_url needs fsspec: {install_command('remote')}"
            ) from error
        try:
            self._fs, self._root = url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise OperatorFault(f"learner.checkpoint_url: {self.url}: {_line(error)}") from error

    def names(self) -> list[str]:
        """The directories under the URL that are whole."""

        def find() -> list[str]:
            # Another host may have written since this one looked.
            self._fs.invalidate_cache()
            return [Path(each).parent.name for each in self._fs.glob(f"{self._root}/*/{DIGESTS}")]

        return self._patiently("list the checkpoints in", self.url, find)

    def begun(self) -> list[str]:
        """The directories under the URL, whole or not."""

        def find() -> list[str]:
            self._fs.invalidate_cache()
            with contextlib.suppress(FileNotFoundError):
                return [Path(each).name for each in self._fs.ls(self._root, detail=False)]
            return []

        return self._patiently("list the checkpoints in", self.url, find)

    def upload(self, directory: Path) -> None:
        """Copy a checkpoint; it counts once this returns. An incomplete copy of this name is written
        again.
        """
        files = sorted(directory.iterdir(), key=lambda path: (path.name == DIGESTS, path.name))
        remote = f"{self._root}/{directory.name}"
        what = f"{self.url}/{directory.name}"
        self._make(remote)
        for path in files:
            self._put(path, f"{remote}/{path.name}", what)

    def download(self, name: str, directory: Path) -> Path:
        """Copy a checkpoint to `directory`/`name`, which must not exist. Returns that path.

        ValueError: its bytes are not those that were saved. StoreFault: also if the disk refused.
        """
        target, remote = directory / name, f"{self._root}/{name}"
        digests = self._read(f"{remote}/{DIGESTS}")
        if not digests:
            raise ValueError(f"{DIGESTS} is empty")
        with store_faults("cannot write the checkpoint", target), whole_directory(target) as aside:
            for line in digests.splitlines():
                digest, _, file = line.partition("  ")
                if not file or Path(file).name != file:
                    raise ValueError(f"{DIGESTS} is damaged")
                self._get(f"{remote}/{file}", aside / file)
                if blake3().update_mmap(aside / file).hexdigest() != digest:
                    raise ValueError(f"the bytes of {file} are not those that were saved")
            if unnamed := self._files(remote) - {DIGESTS, *(each.name for each in aside.iterdir())}:
                raise ValueError(f"{DIGESTS} does not name {min(unnamed)}")
            (aside / DIGESTS).write_text(digests)
        return target

    def remove(self, name: str) -> None:
        """Remove a checkpoint, if it exists. It stops counting at once, before its files are deleted."""
        remote, what = f"{self._root}/{name}", f"{self.url}/{name}"

        def remove(path: str, *, recursive: bool) -> None:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm(path, recursive=recursive)

        self._patiently("remove", what, lambda: remove(f"{remote}/{DIGESTS}", recursive=False))
        self._patiently("remove", what, lambda: remove(remote, recursive=True))

    def keep_identity(self, out_dir: Path) -> None:
        """Copy the learner's identity to the URL, so that it outlives its host."""
        if self._has_identity or not (out_dir / ID_FILE).exists():
            return
        self._make(self._root)
        for name in (DAY_FILE, ID_FILE):
            if (out_dir / name).exists():
                self._put(out_dir / name, f"{self._root}/{name}", f"{self.url}/{name}")
        self._has_identity = True

    def bring_identity(self, out_dir: Path) -> None:
        """Copy the identity from the URL to an out_dir that has none."""
        for name in (DAY_FILE, ID_FILE):
            path = out_dir / name
            if not path.exists() and (found := self._read(f"{self._root}/{name}")):
                with store_faults("cannot write the learner's identity in", out_dir):
                    out_dir.mkdir(parents=True, exist_ok=True)
                    path.write_text(found)

    def _files(self, directory: str) -> set[str]:
        def find() -> set[str]:
            return {Path(each).name for each in self._fs.ls(directory, detail=False)}

        return self._patiently("list", directory, find)

    def _make(self, directory: str) -> None:
        # Object stores have no directories. Making one could create a bucket with a mistyped name.
        if not self._fs.async_impl:
            what = f"{self.url} ({directory})"
            self._patiently("write", what, lambda: self._fs.makedirs(directory, exist_ok=True))

    def _put(self, path: Path, remote: str, what: str) -> None:
        self._patiently("write", what, lambda: self._fs.put_file(str(path), remote))

    def _get(self, remote: str, path: Path) -> None:
        def get() -> bool:
            try:
                self._fs.get_file(remote, str(path))
            except FileNotFoundError:
                return False
            return True

        if not self._patiently("read", remote, get):
            raise ValueError(f"{path.name} is missing")

    def _read(self, remote: str) -> str:
        """The text of a file, "" if it does not exist."""

        def read() -> bytes:
            with contextlib.suppress(FileNotFoundError):
                found: bytes = self._fs.cat_file(remote)
                return found
            return b""

        return self._patiently("read", remote, read).decode(errors="replace")

    def _patiently(self, doing: str, what: str, call: Callable[[], _T]) -> _T:
        """Call until a try succeeds, and return its result. StoreFault: all tries failed."""
        for pause_s in (*PAUSES_S, None):
            try:
                return call()
            except Exception as error:  # each library behind fsspec has errors of its own
                if pause_s is None or isinstance(error, _LASTING):
                    raise StoreFault(f"cannot {doing} {what}: {_line(error)}") from error
                log.warning("cannot %s %s, trying again: %s", doing, what, _line(error))
            time.sleep(pause_s)
        raise AssertionError("the last try returns or raises")


def _line(error: BaseException) -> str:
    # An error may quote a whole answer of the service.
    return (" ".join(str(error).split()) or type(error).__name__)[:200]
