"""Every command in README, docs and examples exists, with the options that it is given there.

So does every name that a program in these pages imports.
"""

import importlib
import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from echo2d.cli import main
from echo2d.learner.__main__ import _parse
from tests.support.paths import REPO
from tests.support.readme import CLONED, first_steps

PAGES = [
    REPO / "README.md",
    REPO / "examples" / "README.md",
    *sorted((REPO / "docs").rglob("*.md")),
]
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (REPO / "Makefile").read_text(), re.MULTILINE))
OURS = re.compile(r"(\S*/)?(echo2d|make|python3?) ")
LINES_MAX = 120  # of README: it is skimmed
TYPED_LINES_MAX = 12  # from nothing to a first train step on two machines


def command_lines(text: str) -> Iterator[str]:
    """What stands behind a prompt or in an indented block, or in a code span, without comments."""
    text = text.replace("\\\n", " ")
    lines = re.findall(
        r"^[$#] (.+)$", "".join(re.findall(r"```console\n(.*?)```", text, re.DOTALL)), re.MULTILINE
    )
    lines += re.findall(r"^    ((?:\S*/)?(?:echo2d|make|python3?) .+)$", text, re.MULTILINE)
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    for line in [*lines, *spans]:
        # An optional part counts as given, and quotes may hold a separator.
        bare = re.sub(r"\[(--[^]]*)\]", r"\1", re.sub(r" +#.*$", "", line))
        yield from re.split(r""" -- (?=/)|(?: && |; | \| | &$)(?=(?:[^"]*"[^"]*")*[^"]*$)""", bare)


def wrong(line: str) -> str:
    """What is wrong with the command; empty if nothing is, or if it is another program's."""
    if OURS.match(line) is None:
        return ""
    words = shlex.split(line)
    program = Path(words[0]).name
    if program == "echo2d" and words[1:2] == ["learn"]:
        return wrong_learner(words[2:])
    if program == "echo2d" and len(words) > 1 and Path(words[0]).suffix == "":
        return wrong_click(main, words[1:])
    if program == "make":
        unknown = [word for word in words[1:] if "=" not in word and word not in TARGETS]
        return f"no target {unknown}" if unknown else ""
    if program.startswith("python") and words[1:2] == ["-m"]:
        return wrong_module(words[2], words[3:])
    if program.startswith("python") and words[1].endswith(".py"):
        return "" if (REPO / words[1]).is_file() else f"no file {words[1]}"
    return ""


def wrong_module(module: str, options: list[str]) -> str:
    if importlib.util.find_spec(module) is None:
        return f"no module {module}"
    return wrong_learner(options) if module in {"learner", "echo2d.learner"} else ""


def wrong_learner(options: list[str]) -> str:
    try:
        _parse(options or ["--print-config"])
    except SystemExit:
        return f"the learner does not take {options}"
    return ""


def wrong_click(group: click.Command, words: list[str]) -> str:
    while isinstance(group, click.Group) and words and not words[0].startswith("-"):
        found = group.get_command(click.Context(group), words[0])
        if found is None:
            return f"no command {words[0]}"
        group, words = found, words[1:]
    known = {option for each in group.params for option in (*each.opts, *each.secondary_opts)}
    given = {word.partition("=")[0] for word in options_of(group, words)}
    return f"{group.name} has no {sorted(given - known)}" if given - known - {"--help"} else ""


def options_of(group: click.Command, words: list[str]) -> Iterator[str]:
    """The words that are options, not values of the option before them."""
    valued = {o for each in group.params if not getattr(each, "is_flag", False) for o in each.opts}
    before = ""
    for word in words:
        if word == "--":
            return
        if word.startswith("--") and before not in valued:
            yield word
        before = word


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


def test_the_pages_were_read() -> None:
    lines = [line for page in PAGES for line in command_lines(page.read_text())]
    assert len([line for line in lines if OURS.match(line)]) > 100
    assert len([name for page in PAGES for name in imports(page.read_text())]) > 5


@pytest.mark.parametrize(
    "line",
    [
        "echo2d joyn https://HOST:PORT",
        "/opt/echo2d/bin/echo2d token create box --rle worker",
        "echo2d plan FILE --lve RUN_DIR",
        "make dmo ARGS=--chaos",
        "python -m learnr --config run.toml",
        "python -m learner --confg run.toml",
        "echo2d learn --confg run.toml",
        "python tools/mutant.py",
    ],
)
def test_a_planted_mistake_is_found(line: str) -> None:
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
