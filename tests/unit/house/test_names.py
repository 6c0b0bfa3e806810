"""A public class, type alias or constant of echo2d and learner has a name that no other one has.

A name that only its own module uses is private (`_NAME`), and another module may have the same one.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.support.paths import REPO


def public_names(source: str) -> Iterator[str]:
    """The classes, the aliases and the constants that a module defines at its top level."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
        else:
            continue
        # A single letter is the variable of a generic type.
        if name[0].isupper() and len(name) > 1:
            yield name


def duplicates(sources: dict[str, str]) -> dict[str, list[str]]:
    """Every name that several modules define, with these modules."""
    places: dict[str, list[str]] = {}
    for path, source in sources.items():
        for name in public_names(source):
            places.setdefault(name, []).append(path)
    return {name: paths for name, paths in places.items() if len(paths) > 1}


def sources() -> dict[str, str]:
    paths: list[Path] = [
        path for top in ("echo2d", "learner") for path in sorted((REPO / top).rglob("*.py"))
    ]
    return {str(path.relative_to(REPO)): path.read_text() for path in paths}


def test_no_public_name_exists_twice() -> None:
    assert duplicates(sources()) == {}


def test_a_planted_second_name_is_found() -> None:
    found = duplicates(
        {
            **sources(),
            "planted.py": "class Membership:\n    pass\n\nVersionKey = tuple[int, bytes]\nSTUCK_S = 1.0\n",
        }
    )
    assert set(found) == {"Membership", "VersionKey", "STUCK_S"}
