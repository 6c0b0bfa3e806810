"""Directories that are there whole or not at all, even when the machine dies: written aside, synced, renamed.

A name is never used twice: what stands under it is not overwritten, so a crash at any point leaves the old and the new.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from echo2d.client import StoreFault

ASIDE = ".tmp-"


@contextlib.contextmanager
def whole_directory(directory: Path) -> Iterator[Path]:
    """A directory to fill. It becomes `directory` when the block ends well, and vanishes otherwise."""
    aside = directory.with_name(ASIDE + directory.name)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        for path in (*aside.iterdir(), aside):
            _sync(path)
        aside.rename(directory)
        for parent in (directory.parent, directory.parent.parent):  # which may be as new
            _sync(parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def remove_directory(directory: Path) -> None:
    """At once, as far as anybody sees who looks for it by its name."""
    aside = directory.with_name(ASIDE + directory.name)
    with contextlib.suppress(OSError):  # it is there, or it is not
        directory.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


@contextlib.contextmanager
def store_faults(doing: str, path: Path) -> Iterator[None]:
    """A disk that refuses is a StoreFault that says what for."""
    try:
        yield
    except OSError as error:
        raise StoreFault(f"{doing} {path}: {error.strerror or error}") from error


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
