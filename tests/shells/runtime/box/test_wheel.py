"""The wheel that a coordinator gives to its boxes equals the one that pip makes of the same files."""

import asyncio
import base64
import hashlib
import importlib.metadata
import io
import subprocess
import threading
import zipfile
from pathlib import Path

import pytest

from echo2d.errors import OperatorFault
from echo2d.runtime.box import wheel
from echo2d.runtime.box.wheel import GivenWheel, installed_wheel
from echo2d.this_build import THIS_BUILD
from tests.support.polling import HANG_S


def test_the_wheel_holds_the_package_and_its_metadata() -> None:
    name, data = installed_wheel()
    version = importlib.metadata.version("echo2d")
    assert name.startswith(f"echo2d-{version}-")
    packed = zipfile.ZipFile(io.BytesIO(data))
    names = set(packed.namelist())
    about = f"echo2d-{version}.dist-info"
    assert {"echo2d/cli/__init__.py", "echo2d/learner/train.py", f"{about}/METADATA"} <= names
    assert not [each for each in names if "__pycache__" in each or each.startswith("echo2d/share/")]
    assert b"echo2d = echo2d.cli:main" in packed.read(f"{about}/entry_points.txt")
    lines = packed.read(f"{about}/RECORD").decode().splitlines()
    assert {line.split(",")[0] for line in lines} == names
    for line in lines[:-1]:
        path, digest, size = line.split(",")
        found = hashlib.sha256(packed.read(path)).digest()
        assert digest == "sha256=" + base64.urlsafe_b64encode(found).rstrip(b"=").decode()
        assert int(size) == packed.getinfo(path).file_size


def test_a_checkout_that_was_built_in_place_gives_the_wheel_its_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its egg-info comes first on the path of `python -m echo2d`."""
    egg = tmp_path / "echo2d.egg-info"
    egg.mkdir()
    text = "Metadata-Version: 2.1\nName: echo2d\nVersion: 0.1.0\n"
    (egg / "PKG-INFO").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    _, data = installed_wheel()
    packed = zipfile.ZipFile(io.BytesIO(data))
    about = next(name for name in packed.namelist() if name.endswith("dist-info/METADATA"))
    assert packed.read(about).decode() == text
    (egg / "PKG-INFO").write_text("")
    monkeypatch.setattr(
        importlib.metadata, "distribution", lambda _: importlib.metadata.PathDistribution(egg)
    )
    monkeypatch.setattr(importlib.metadata.PathDistribution, "version", "0.1.0")
    with pytest.raises(OperatorFault, match="its metadata are gone"):
        installed_wheel()


async def test_the_wheel_is_made_once() -> None:
    given = GivenWheel()
    first, second = await asyncio.gather(given.get(), given.get())
    assert first is second


async def test_callers_that_hang_up_start_the_build_of_the_wheel_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started, go, builds = asyncio.Event(), threading.Event(), []
    loop = asyncio.get_running_loop()

    def build() -> tuple[str, bytes]:
        builds.append(1)
        loop.call_soon_threadsafe(started.set)
        go.wait(HANG_S)
        return "a.whl", b"a wheel"

    monkeypatch.setattr(wheel, "installed_wheel", build)
    given = wheel.GivenWheel()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(3):
            caller = tasks.create_task(given.get())
            await started.wait()
            caller.cancel()
            await asyncio.wait({caller})
        waits = tasks.create_task(given.get())
        await asyncio.sleep(0)
        go.set()
    assert (waits.result(), builds) == (("a.whl", b"a wheel"), [1])


async def test_a_wheel_that_could_not_be_made_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails() -> tuple[str, bytes]:
        raise OperatorFault("no")

    given = wheel.GivenWheel()
    monkeypatch.setattr(wheel, "installed_wheel", fails)
    with pytest.raises(OperatorFault):
        await given.get()
    monkeypatch.setattr(wheel, "installed_wheel", lambda: ("a.whl", b""))
    assert await given.get() == ("a.whl", b"")


def test_the_wheel_has_no_file_that_was_left_beside_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, elsewhere = tmp_path / "echo2d", tmp_path / "elsewhere"
    for folder in (package / "native", package / ".idea", elsewhere, tmp_path / "learner"):
        folder.mkdir(parents=True)
    kept = ["a.py", "native/b.pyi", "py.typed"]
    for name in (
        *kept,
        "own.token",
        ".env",
        "a.py~",
        "a.py.orig",
        ".#a.py",
        ".idea/x.py",
        "keys.json",
    ):
        (package / name).touch()
    (elsewhere / "secret.py").touch()
    (tmp_path / "learner" / "train.py").touch()
    (package / "out").symlink_to(elsewhere)
    (package / "c.py").symlink_to(elsewhere / "secret.py")
    monkeypatch.setattr(wheel, "PACKAGE", package)
    monkeypatch.setattr(wheel, "_learner", lambda: tmp_path / "learner")
    names = zipfile.ZipFile(io.BytesIO(installed_wheel()[1])).namelist()
    expected = {*kept, "learner/train.py", "build.txt"}
    assert {each for each in names if "dist-info" not in each} == {
        f"echo2d/{each}" for each in expected
    }


def test_the_wheel_has_every_file_of_the_package() -> None:
    names = zipfile.ZipFile(io.BytesIO(installed_wheel()[1])).namelist()
    tracked = subprocess.run(
        ["git", "ls-files", "echo2d", "learner"],
        cwd=wheel.PACKAGE.parent,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    wanted = {f"echo2d/{each}" if each.startswith("learner/") else each for each in tracked}
    links = {each for each in wanted if each.startswith("echo2d/share/")}
    assert wanted - links <= set(names)


def test_the_wheel_names_the_coordinators_build() -> None:
    packed = zipfile.ZipFile(io.BytesIO(installed_wheel()[1]))
    assert packed.read("echo2d/build.txt").decode() == THIS_BUILD.name


def test_a_copy_that_was_never_installed_gives_no_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    def distribution(name: str) -> importlib.metadata.Distribution:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    with pytest.raises(OperatorFault, match="there is no wheel to give"):
        installed_wheel()
