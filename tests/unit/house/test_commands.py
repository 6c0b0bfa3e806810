"""Every command in README, docs and examples exists, with the options that it has there.

So does every name that a program in these pages imports.
"""

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.commands import OURS, command_lines, wrong
from tests.support.paths import REPO
from tests.support.readme import CLONED, first_steps

PAGES = [
    REPO / "README.md",
    REPO / "examples" / "README.md",
    *sorted((REPO / "docs").rglob("*.md")),
]
LINES_MAX = 120  # of README: it is skimmed
TYPED_LINES_MAX = 12  # from nothing to a first train step on two machines


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_every_command_exists_with_its_options(page: Path) -> None:
    lines = list(command_lines(page.read_text()))
    assert {line: wrong(line) for line in lines if wrong(line)} == {}


def imports(text: str) -> Iterator[tuple[str, str]]:
    """Each (module, name) that a program in the text imports from this project."""
    for module, names in re.findall(
        r"from ((?:echo2d|tests|tools)[.\w]*) import (\w+(?:, \w+)*)", text
    ):
        yield from ((module, name) for name in names.split(", "))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_every_imported_name_exists(page: Path) -> None:
    for module, name in imports(page.read_text()):
        assert hasattr(importlib.import_module(module), name), f"{module} has no {name}"


def test_the_test_reads_the_commands_of_the_pages() -> None:
    lines = [line for page in PAGES for line in command_lines(page.read_text())]
    assert len([line for line in lines if OURS.match(line)]) > 100
    assert len([name for page in PAGES for name in imports(page.read_text())]) > 5


@pytest.mark.parametrize(
    "line",
    [
        "echo2d joyn https://HOST:PORT",
        "/opt/echo2d/bin/echo2d token create box --rle worker",
        "echo2d doctor https://HOST:PORT --listen-hst 10.0.0.2",
        "echo2d keep exprt --last DIR",
        "echo2d plan FILE --lve RUN_DIR",
        "make dmo ARGS=--chaos",
        "python -m learnr --config run.toml",
        "python -m learner --confg run.toml",
        "echo2d learn --confg run.toml",
        "python tools/mutant.py",
    ],
)
def test_a_planted_wrong_command_is_found(line: str) -> None:
    assert wrong(line)


def test_the_readme_is_short_and_says_first_whom_it_is_for() -> None:
    text = (REPO / "README.md").read_text()
    order = ["make demo", "## Is it for me?", "## Five minutes", "docs/architecture.md"]
    assert sorted(order, key=text.index) == order
    assert text.count("\n") <= LINES_MAX


def test_the_first_steps_are_few_and_edit_no_file() -> None:
    """tests/nightly/lab/test_first_hour.py types them."""
    typed = [*CLONED, *(line for terminal in first_steps() for line in terminal)]
    assert len(typed) <= TYPED_LINES_MAX
    assert [line for line in typed if re.search(r"editor|vi |nano|sed |>", line)] == []
