"""Wheel and sdist of this checkout, and the lowest versions that the wheel declares."""

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from email.parser import HeaderParser
from pathlib import Path

from packaging.requirements import Requirement

from tests.support.paths import REPO

BUILD = """
import sys
from setuptools import build_meta
directory = sys.argv[1]
build_meta.build_sdist(directory)
build_meta.build_wheel(directory)
"""


def build_distribution(directory: Path) -> Path:
    """Build wheel and sdist from the files that git tracks, into the directory. Returns the wheel."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached"], cwd=REPO, check=True, capture_output=True, text=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        if not os.path.lexists(REPO / name):
            continue
        target = directory / "source" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPO / name, target, follow_symlinks=False)
    subprocess.run(
        [sys.executable, "-c", BUILD, str(directory)],
        cwd=directory / "source",
        check=True,
        capture_output=True,
    )
    (wheel,) = directory.glob("*.whl")
    return wheel


def read_metadata(wheel: Path) -> str:
    """The text of METADATA, which a package index shows."""
    with zipfile.ZipFile(wheel) as files:
        (name,) = (name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
        return files.read(name).decode()


def lowest_requirements(wheel: Path, extras: tuple[str, ...]) -> Iterator[str]:
    """`name==lowest` for each package that the wheel with these extras needs on this machine."""
    for line in HeaderParser().parsestr(read_metadata(wheel)).get_all("Requires-Dist", []):
        needed = Requirement(line)
        if needed.marker is None or any(needed.marker.evaluate({"extra": e}) for e in extras):
            (lowest,) = (each.version for each in needed.specifier if each.operator == ">=")
            yield f"{needed.name}=={lowest}"
