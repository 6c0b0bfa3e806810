"""This build, as it names itself to other programs: its version and, in a checkout, its commit.

The commit is read from git's files without running git. Changes that are not committed do not show.
"""

import re
from dataclasses import replace
from pathlib import Path

from echo2d import __version__
from echo2d.core.protocol.builds import OURS

COMMIT_CHARS = 8
_COMMIT = re.compile("[0-9a-f]{40,64}")


def build_name(checkout: Path) -> str:
    """As in 0.1.0+g45e11598; only the version if this directory is no checkout of echo2d."""
    commit = _commit(checkout) if (checkout / "pyproject.toml").is_file() else ""
    return f"{__version__}+g{commit[:COMMIT_CHARS]}" if commit else __version__


def _commit(checkout: Path) -> str:
    """The commit that is checked out; empty if it cannot be told."""
    try:
        git = checkout / ".git"
        if git.is_file():  # of a worktree
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


# Made at the import: files are not read while an event loop runs.
THIS_BUILD = replace(OURS, name=build_name(Path(__file__).parents[1]))
