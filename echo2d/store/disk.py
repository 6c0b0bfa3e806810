"""The file operations that all stores use. Blocking; a `StoreFault` says what failed and where."""

import contextlib
import errno
import os
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from echo2d.core.base.canonical import Buffer
from echo2d.errors import HOST_LACKS, StoreFault, path_fault


@contextlib.contextmanager
def store_faults(doing: str, path: Path) -> Iterator[None]:
    """Turn an OSError into a StoreFault that says what failed and where, and whether the disk is full."""
    try:
        yield
    except OSError as error:
        found = path_fault(f"{doing} {path} failed", error)
        raise StoreFault(str(found), full=isinstance(found, StoreFault) and found.full) from error


# Errors of SQLite whose cause is this host, and not the file.
_HOST_ERRORS = frozenset(
    {
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_BUSY,
    }
)


def is_of_the_host(error: Exception) -> bool:
    """Whether the cause of an error of SQLite, or of a system call, is this host and not the file."""
    if isinstance(error, OSError):
        return error.errno in HOST_LACKS
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in _HOST_ERRORS


def sqlite_words(path: Path, error: Exception) -> str:
    """The error of SQLite, and what this host lacks if that can be seen."""
    try:
        os.close(os.open(path.parent, os.O_RDONLY))
        full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
        full = full or not shutil.disk_usage(path.parent).free
        lacks = HOST_LACKS[errno.ENOSPC] if full else ""
    except OSError as found:
        lacks = HOST_LACKS.get(found.errno or 0, "")
    return f"{error}: {lacks}" if lacks and is_of_the_host(error) else str(error)


@contextlib.contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """Open a file descriptor. A symbolic link in the last part of the path is refused."""
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def write_at(path: Path, data: Buffer, offset: int) -> None:
    """Write all of `data` into an existing file."""
    with opened(path, os.O_WRONLY) as fd:
        write_all(fd, data, offset)


def write_all(fd: int, data: Buffer, offset: int) -> None:
    """Write all of `data` at this offset. Raises OSError, for the caller to translate."""
    view = memoryview(data)
    while len(view):
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def read_at(path: Path, length: int, offset: int) -> bytes:
    """Read up to `length` bytes; fewer only at the end of the file."""
    parts = []
    with opened(path, os.O_RDONLY) as fd:
        while length > 0:
            part = os.pread(fd, length, offset)
            if not part:
                break
            parts.append(part)
            length, offset = length - len(part), offset + len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def read_into(path: Path, buffer: memoryview, offset: int) -> int:
    """Fill `buffer`, or read to the end of the file. Returns the number of bytes read."""
    done = 0
    with opened(path, os.O_RDONLY) as fd:
        while done < len(buffer):
            part = os.preadv(fd, [buffer[done:]], offset + done)
            if not part:
                break
            done += part
    return done


def read_file(path: Path) -> bytes:
    """Read a whole file."""
    return read_at(path, path.stat().st_size, 0)


def allocate(path: Path, size: int, *, sparse: bool = False) -> None:
    """Give a file this size, keeping its content and creating it if needed. Reserves its space
    unless `sparse`.
    """
    with opened(path, os.O_WRONLY | os.O_CREAT) as fd:
        os.ftruncate(fd, size)
        if size and not sparse:
            os.posix_fallocate(fd, 0, size)


def sync(path: Path) -> None:
    """Make a file or directory durable. It may be a symbolic link, such as systemd makes to the state
    directory of a service with its own user.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def staged(path: Path, data: bytes, *, durable: bool) -> Path:
    """Write a file next to `path`, ready to replace it."""
    scratch = path.with_name(path.name + ".new")
    allocate(scratch, len(data))
    write_at(scratch, data, 0)
    if durable:
        sync(scratch)
    return scratch


def replace_file(path: Path, data: bytes, *, durable: bool) -> None:
    """Replace the file at `path` atomically: after a crash it is the old one or the new one."""
    staged(path, data, durable=durable).replace(path)
    if durable:
        sync(path.parent)
