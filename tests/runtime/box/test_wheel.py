"""The wheel that a coordinator gives to its boxes is what pip makes of the same files."""

import asyncio
import base64
import hashlib
import importlib.metadata
import io
import zipfile

import pytest

from echo2d.errors import OperatorFault
from echo2d.runtime.box.wheel import GivenWheel, installed_wheel


def test_it_holds_the_package_and_says_so() -> None:
    name, data = installed_wheel()
    version = importlib.metadata.version("echo2d")
    assert name.startswith(f"echo2d-{version}-")
    wheel = zipfile.ZipFile(io.BytesIO(data))
    names = set(wheel.namelist())
    about = f"echo2d-{version}.dist-info"
    assert {"echo2d/cli/__init__.py", "echo2d/learner/train.py", f"{about}/METADATA"} <= names
    assert not [each for each in names if "__pycache__" in each or each.startswith("echo2d/share/")]
    assert b"echo2d = echo2d.cli:main" in wheel.read(f"{about}/entry_points.txt")
    lines = wheel.read(f"{about}/RECORD").decode().splitlines()
    assert {line.split(",")[0] for line in lines} == names
    for line in lines[:-1]:
        path, digest, size = line.split(",")
        found = hashlib.sha256(wheel.read(path)).digest()
        assert digest == "sha256=" + base64.urlsafe_b64encode(found).rstrip(b"=").decode()
        assert int(size) == wheel.getinfo(path).file_size


async def test_it_is_made_once() -> None:
    given = GivenWheel()
    first, second = await asyncio.gather(given.get(), given.get())
    assert first is second


def test_a_copy_that_was_never_installed_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def distribution(name: str) -> importlib.metadata.Distribution:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    with pytest.raises(OperatorFault, match="there is no wheel to give"):
        installed_wheel()
