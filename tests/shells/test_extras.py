"""The advice about a missing package works for the way in which this copy was installed."""

import importlib.metadata
import importlib.util
import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest

from echo2d.extras import install_command
from tests.support.paths import REPO

EXTRAS = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.mark.parametrize("extra", [name for name in EXTRAS if name != "dev"])
def test_the_advice_names_the_missing_packages(extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f'{each}; extra == "{name}"' for name in EXTRAS for each in EXTRAS[name]]
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: ["aiohttp>=3.10", *lines])
    words = shlex.split(install_command(extra))
    assert words[0] == sys.executable
    assert words[1:] == ["-m", "pip", "install", *EXTRAS[extra]]


def test_an_installed_copy_knows_its_extras() -> None:
    assert "matplotlib" in install_command("plot")


def test_the_advice_fits_pipx_and_uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert install_command("plot").startswith(f"uv pip install --python {sys.executable} ")
    (tmp_path / "echo2d").mkdir()
    (tmp_path / "echo2d" / "pipx_metadata.json").touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "echo2d"))
    assert install_command("plot").startswith("pipx inject echo2d ")


def test_the_advice_fits_a_checkout_that_was_never_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def requires(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    assert shlex.split(install_command("plot"))[-1] == f"{REPO}[plot]"


def test_no_message_says_to_install_echo2d_from_an_index() -> None:
    """The name is not ours there: whoever registers it would own the machine."""
    places = [*REPO.glob("*.md")]
    for folder in ("docs", "echo2d", "examples", "learner", "systemd", "tools"):
        places += [
            path
            for path in (REPO / folder).rglob("*")
            if path.is_file() and path.suffix in {".md", ".py", ".sh", ".toml", ".service"}
        ]
    command = re.compile(r"(pip|pipx|tool|add)( install)? ['\"]?echo2d\b")
    assert [path for path in places if command.search(path.read_text())] == []
