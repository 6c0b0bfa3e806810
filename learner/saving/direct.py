"""Write large files past the page cache and digest them meanwhile, so that training is slowed least.

Usually a checkpoint is not read again. Writing it through the page cache would spend CPU time on finding, filling and
freeing pages, and training on a CPU needs this time. A digest made afterwards would read the whole file again.
"""

import contextlib
import errno
import fcntl
import io
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from blake3 import blake3
from torch.distributed.checkpoint.filesystem import FileSystem

# The size of one write: large enough for any disk, and small enough that the bytes stay in the processor's
# cache until they are digested.
BUFFER_BYTES = 4 << 20
# The size of a direct write must be a multiple of the disk's block; no disk has larger blocks than this.
DIRECT_BLOCK_BYTES = 4096
SHARDS = ".distcp"  # suffix of the files with tensors


class DirectFile(io.RawIOBase):
    """A new file that is written once, from front to back. If the file system has no direct writes, it is
    written through the page cache.

    OSError: the disk refused.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._digest = blake3()
        # The memory of a direct write must begin at a page.
        self._view = memoryview(mmap.mmap(-1, BUFFER_BYTES))
        self._filled = self._written = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            self._file = os.open(path, flags | os.O_DIRECT, 0o666)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # Without O_EXCL, because some file systems refuse O_DIRECT only after they have made the file.
            self._file = os.open(path, flags & ~os.O_EXCL, 0o666)

    @property
    def digest(self) -> str:
        """BLAKE3 of the whole file, once it is closed, in hexadecimal."""
        return self._digest.hexdigest()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._file

    def tell(self) -> int:
        return self._written + self._filled

    def write(self, data: Any) -> int:
        left = memoryview(data).cast("B")
        size = len(left)
        while left:
            part = left[: BUFFER_BYTES - self._filled]
            self._view[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            left = left[len(part) :]
            if self._filled == BUFFER_BYTES:
                self._write_out()
        return size

    def close(self) -> None:
        """Write the remaining bytes. A second call does nothing."""
        if self.closed:
            return
        try:
            if self._filled:
                self._write_out()
        finally:
            os.close(self._file)
            super().close()

    def _write_out(self) -> None:
        # Emptied first, so that `close` does not write these bytes again after a failure.
        size, self._filled = self._filled, 0
        self._digest.update(self._view[:size])
        whole, done = -(-size // DIRECT_BLOCK_BYTES) * DIRECT_BLOCK_BYTES, 0
        while done < whole:
            done += self._write_some(self._view[done:whole])
        self._written += size
        if whole > size:
            os.ftruncate(self._file, self._written)

    def _write_some(self, part: memoryview) -> int:
        try:
            return os.write(self._file, part)
        except OSError as error:
            flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
            if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
                raise
            # This happens after a short write, or on a file system that accepts O_DIRECT without support for it.
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            return os.write(self._file, part)


class DirectFileSystem(FileSystem):
    """The file system by which torch's DCP writes its files."""

    def __init__(self) -> None:
        self.digests: dict[str, str] = {}  # of the files with tensors, by name

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        if mode != "wb" or not str(path).endswith(SHARDS):
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with DirectFile(Path(path)) as file:
            yield file
        self.digests[Path(path).name] = file.digest
