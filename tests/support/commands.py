"""Finds the commands that a text names, and says what is wrong with one of them."""

import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click

from echo2d.cli import main
from echo2d.learner.__main__ import _parse
from tests.support.paths import REPO

TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (REPO / "Makefile").read_text(), re.MULTILINE))
TARGETS.add("nightly-NAME")
OURS = re.compile(r"(\S*/)?(echo2d|make|python3?) ")


def command_lines(text: str) -> Iterator[str]:
    """The command lines after a prompt, in an indented block or in a code span, without comments."""
    text = text.replace("\\\n", " ")
    lines = re.findall(
        r"^[$#] (.+)$", "".join(re.findall(r"```console\n(.*?)```", text, re.DOTALL)), re.MULTILINE
    )
    lines += re.findall(r"^    ((?:\S*/)?(?:echo2d|make|python3?) .+)$", text, re.MULTILINE)
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    for line in [*lines, *spans]:
        # Optional parts are read as if they were given. A separator inside quotes does not separate.
        bare = re.sub(r"\[(--[^]]*)\]", r"\1", re.sub(r" +#.*$", "", line))
        yield from re.split(r""" -- (?=/)|(?: && |; | \| | &$)(?=(?:[^"]*"[^"]*")*[^"]*$)""", bare)


def wrong(line: str) -> str:
    """What is wrong with the command; empty if it is right, or belongs to another program."""
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
    params = [*group.params, *(main.commands["join"].params if group.name == "doctor" else [])]
    known = {option for each in params for option in (*each.opts, *each.secondary_opts)}
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
