"""The name of a build has its version and, in a checkout, the commit; git is not run."""

import subprocess
from pathlib import Path

import pytest

from echo2d import __version__
from echo2d.core.protocol.builds import BUILD_CHARS_MAX
from echo2d.this_build import BUILD_FILE, THIS_BUILD, build_name

COMMIT = "45e115980123456789abcdef0123456789abcdef"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").touch()
    return tmp_path


def git(folder: Path, *words: str) -> str:
    return subprocess.run(
        ["git", "-C", folder, "-c", "user.name=t", "-c", "user.email=t@localhost", *words],
        check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip


def test_a_checkout_and_a_worktree_of_it_name_their_commit(checkout: Path, tmp_path: Path) -> None:
    git(checkout, "init", "-q", "-b", "main")
    git(checkout, "add", "pyproject.toml")
    git(checkout, "commit", "-qm", "first")
    expected = f"{__version__}+g{git(checkout, 'rev-parse', 'HEAD')[:8]}"
    assert build_name(checkout) == expected
    git(checkout, "pack-refs", "--all")
    assert build_name(checkout) == expected
    git(checkout, "worktree", "add", "-q", "-b", "side", str(tmp_path / "side"))
    assert build_name(tmp_path / "side") == expected
    git(checkout, "checkout", "-q", "--detach")
    assert build_name(checkout) == expected


@pytest.mark.parametrize("head", ["", "ref: refs/heads/none", "no commit", "\xff"])
def test_a_checkout_that_cannot_be_read_has_only_its_version(checkout: Path, head: str) -> None:
    (checkout / ".git").mkdir()
    (checkout / ".git" / "HEAD").write_bytes(head.encode("latin-1"))
    assert build_name(checkout) == __version__


def test_a_folder_in_another_repository_has_only_the_version(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "HEAD").write_text(COMMIT)
    assert build_name(tmp_path) == __version__
    (tmp_path / "pyproject.toml").touch()
    assert build_name(tmp_path) == f"{__version__}+g{COMMIT[:8]}"


def test_a_wheel_from_a_coordinator_names_the_coordinators_build(tmp_path: Path) -> None:
    (tmp_path / "echo2d").mkdir()
    for text, expected in (
        (f"{__version__}+g4d1188c1", f"{__version__}+g4d1188c1"),
        ("9.9.9+g4d1188c1", __version__),
        (f"{__version__}+g4d11\n", __version__),
    ):
        (tmp_path / "echo2d" / BUILD_FILE).write_text(text)
        assert build_name(tmp_path) == expected


def test_the_name_of_this_build_fits_and_is_shown_unchanged() -> None:
    assert len(THIS_BUILD.name) <= BUILD_CHARS_MAX
    assert THIS_BUILD.shown == THIS_BUILD.name
