"""The name of this build, which other programs see: its version and its commit.

In a checkout the commit is read from git's files without running git. Uncommitted changes do not change the name. A
wheel that a coordinator serves has the name of the coordinator's build in BUILD_FILE.
"""

import re
from dataclasses import replace
from pathlib import Path

from echo2d import __version__
from echo2d.core.protocol.builds import OURS

COMMIT_CHARS = 8
BUILD_FILE = "build.txt"
_NAME = re.compile(re.escape(__version__) + r"(\+g[0-9a-f]{1,8})?")
_COMMIT = re.compile("[0-9a-f]{40,64}")


def build_name(checkout: Path) -> str:
    """The name, such as 0.1.0+g45e11598; only the version if the commit is not known.

    checkout: the directory that holds the package; it need not be a checkout.
    """
    if (checkout / "pyproject.toml").is_file():
        commit = _commit(checkout)
        return f"{__version__}+g{commit[:COMMIT_CHARS]}" if commit else __version__
    return _given(checkout / "echo2d" / BUILD_FILE)


def _given(path: Path) -> str:
    try:
        name = path.read_text()
    except (OSError, ValueError):
        return __version__
    return name if _NAME.fullmatch(name) else __version__


def _commit(checkout: Path) -> str:
    """The commit that is checked out; empty if it is not known."""
    try:
        git = checkout / ".git"
        if git.is_file():  # the checkout is a worktree
            git = checkout / git.read_text().removeprefix("gitdir: ").strip()
        head = (git / "HEAD").read_text().strip()
        common = git / "commondir"
        shared = git / common.read_text().strip() if common.is_file() else git
        found = _resolved(shared, head.removeprefix("ref: ")) if head.startswith("ref: ") else head
    except (OSError, ValueError):
        return ""
    return found if _COMMIT.fullmatch(found) else ""


def _resolved(git: Path, ref: str) -> str:
    loose = git / ref
    if loose.is_file():
        return loose.read_text().strip()
    lines = (git / "packed-refs").read_text().splitlines()
    return next((line.split()[0] for line in lines if line.endswith(f" {ref}")), "")


# The files are read at the import, because none may be read while an event loop runs.
THIS_BUILD = replace(OURS, name=build_name(Path(__file__).parents[1]))
