"""Links of documents lead to existing things: files, anchors, and names of the code."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.paths import REPO, TEST_ROOTS

FOLDERS = ("docs", "examples", "tools", "learner", "echo2d", "systemd", "tests")
PAGES = sorted(
    [*REPO.glob("*.md"), *(page for at in FOLDERS for page in (REPO / at).rglob("*.md"))]
)
NAMES_CHECKED = REPO / "docs" / "architecture.md"  # and every page of docs/design
BASES = (REPO, REPO / "echo2d", REPO / "docs", *TEST_ROOTS)  # what paths are relative to


def without_code(text: str) -> str:
    """The page without fenced blocks, indented blocks and code spans: links in these are no links."""
    text = re.sub(r"^(```|~~~).*?^\1", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^(    |\t).*$", "", text, flags=re.MULTILINE))


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of the page's headings."""
    found: set[str] = set()
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for heading in re.findall(r"^#{1,6} +(.+?) *$", text, re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found.add(slug if slug not in found else f"{slug}-{sum(a.startswith(slug) for a in found)}")
    return found


def dangling_links(page: Path, text: str) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(text)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists():
            yield f"{target}: no such file"
        elif anchor and there.suffix == ".md" and anchor not in anchors(there):
            yield f"{target}: {there.name} has no such heading"


def dangling_paths(text: str) -> Iterator[str]:
    """Python files that are named in code spans and do not exist."""
    for path in re.findall(r"`([\w./-]+/[\w.-]+\.py)(?:::\w+)?`", text):
        if not any((base / path).exists() for base in BASES):
            yield path


@cache
def code_names() -> dict[str, set[str]]:
    """Every class and alias of echo2d and learner, with the names of its methods and fields."""
    found: dict[str, set[str]] = {}
    for path in [*(REPO / "echo2d").rglob("*.py"), *(REPO / "learner").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, set()).update(members(node))
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                found.setdefault(node.targets[0].id, set())
    return found


def members(node: ast.ClassDef) -> Iterator[str]:
    for each in node.body:
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            yield each.name
        elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            yield each.target.id


def dangling_names(text: str) -> Iterator[str]:
    """`Class` and `Class.method` in code spans that the code does not have."""
    for name in re.findall(r"`((?:[A-Z][a-z0-9]+)+(?:\.\w+)?)`", text):
        owner, _, member = name.partition(".")
        if owner not in code_names() or (member and member not in code_names()[owner]):
            yield name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_every_link_leads_to_a_file_and_an_anchor(page: Path) -> None:
    assert list(dangling_links(page, page.read_text())) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_every_file_that_the_documents_name_exists(page: Path) -> None:
    assert list(dangling_paths(page.read_text())) == []


@pytest.mark.parametrize(
    "page", [NAMES_CHECKED, *sorted((REPO / "docs" / "design").glob("*.md"))], ids=lambda p: p.name
)
def test_every_code_name_in_the_documents_exists(page: Path) -> None:
    assert list(dangling_names(page.read_text())) == []


def test_planted_breaches_are_found() -> None:
    page = REPO / "docs" / "architecture.md"
    text = "[a](nowhere.md) [b](#no-heading) [c](scale.md#none) [ok](#processes) `[d](code.md)`"
    assert len(list(dangling_links(page, text))) == 3
    assert list(dangling_paths("`core/work/nothing.py` `core/work/training/staleness.py`")) == [
        "core/work/nothing.py"
    ]
    assert list(dangling_names("`Groups.finished` `Groups.finish` `NoSuchClass` `GET`")) == [
        "Groups.finish",
        "NoSuchClass",
    ]


def misplaced_names(text: str) -> Iterator[str]:
    """Names that a row such as "`core/x.py`: `A`, `b`" gives to a file that does not define them."""
    for path, names in re.findall(r"`([\w/]+\.py)`: ((?:`\w+`(?:, )?)+)", text):
        root = REPO if path.startswith("learner/") else REPO / "echo2d"
        defined = re.findall(r"(?:class|def) (\w+)", (root / path).read_text())
        yield from (
            f"{name} in {path}" for name in re.findall(r"\w+", names) if name not in defined
        )


def test_every_code_name_is_in_the_file_that_the_documents_give() -> None:
    assert list(misplaced_names(NAMES_CHECKED.read_text())) == []
    assert list(misplaced_names("`core/relay/relay.py`: `Relay`, `Publishing`")) == [
        "Publishing in core/relay/relay.py"
    ]
