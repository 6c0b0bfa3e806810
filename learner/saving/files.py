"""Write directories atomically: under a temporary name, synced, then renamed.

After a crash at any point a directory is whole or absent. A name is used once and never
overwritten.
"""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from echo2d.client import OperatorFault, StoreFault

ASIDE = ".tmp-"


def make_directory(key: str, directory: Path) -> None:
    """Make the directory that a key of [learner] names. OperatorFault: it cannot be made."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OperatorFault(f"learner.{key}: cannot make {directory}: {error.strerror}") from error


@contextlib.contextmanager
def whole_directory(directory: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yield a directory to fill. It becomes `directory` at the end of the block, or is deleted on
    an exception. Not durable: after a power failure it may hold files that are not whole.
    """
    aside = directory.with_name(f"{ASIDE}{directory.name}-{secrets.token_hex(4)}")
    # The rename is durable once the parent is synced; the parent may be new itself.
    parents = [directory.parent, *([] if directory.parent.exists() else [directory.parent.parent])]
    aside.mkdir(parents=True)
    try:
        yield aside
        for path in (*aside.iterdir(), aside) if durable else ():
            sync(path)
        aside.rename(directory)
        for parent in parents if durable else ():
            sync(parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def remove_directory(directory: Path) -> Path | None:
    """Remove a directory, if it exists. Its name disappears at once, before its files are deleted.

    Returns what could not be deleted; None: nothing is left.
    """
    aside = directory.with_name(ASIDE + directory.name)
    with contextlib.suppress(OSError):
        directory.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)
    return next((each for each in (directory, aside) if os.path.lexists(each)), None)


@contextlib.contextmanager
def store_faults(doing: str, path: Path) -> Iterator[None]:
    """Turn an OSError into a StoreFault that says what failed, e.g. "cannot write PATH: No space left"."""
    try:
        yield
    except OSError as error:
        raise StoreFault(f"{doing} {path}: {error.strerror or error}") from error


def sync(path: Path) -> None:
    """Make a file, or the names in a directory, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
