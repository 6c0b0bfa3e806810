"""Directories that are there whole or not at all, even when the machine dies: written aside, synced, renamed."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

ASIDE = ".tmp-"


@contextlib.contextmanager
def whole_directory(directory: Path) -> Iterator[Path]:
    """A directory to fill. It takes the place of `directory` when the block ends well, and vanishes otherwise."""
    aside = directory.with_name(ASIDE + directory.name)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        for path in (*aside.iterdir(), aside):
            _sync(path)
        shutil.rmtree(directory, ignore_errors=True)
        aside.rename(directory)
        _sync(directory.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
