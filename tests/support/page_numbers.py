"""Compares numbers in the documents with the output of the commands that make them.

A row quotes a page, with braces around the numbers: "a chain takes {9.2} s and {1.0} copies". The command's JSON
has these numbers under the row's paths, in the same order: "t_verify_s", "workers/0/count", or "bubble * 100" for a
percentage.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.paths import REPO

NUMBER = re.compile(r"\{(-?[0-9.,]+)\}")
HALF = 0.5 + 1e-6  # of the last digit: the largest error of rounding


@dataclass(frozen=True, slots=True)
class PageNumbers:
    """Numbers of a page that one run of a command gives.

    page: the end of its path below docs/. command: as the page writes it. text: of the page, with braces around the
    numbers. reads: a path for each number. more: further arguments, if the page describes them only in words; the last
    value of a repeated option counts. changed: old and new text of the scenario, if a changed copy was run.
    """

    page: str
    command: str
    text: str
    reads: tuple[str, ...]
    more: str = ""
    changed: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.page}: {self.command} {self.more}".strip()


def flat(text: str) -> str:
    """The text on one line, because a page may break it anywhere."""
    return " ".join(text.split())


def page_text(name: str) -> str:
    (page,) = (REPO / "docs").rglob(name)
    return page.read_text()


def missing(row: PageNumbers, page: str) -> list[str]:
    """The row's command and text, as far as the page does not have them (any more)."""
    said = flat(NUMBER.sub(r"\1", row.text))
    return [each for each in (flat(row.command), said) if each not in flat(page)]


def moved(row: PageNumbers, facts: Mapping[str, Any]) -> list[str]:
    """A sentence for each number of the page that the command does not print any more."""
    written = NUMBER.findall(row.text)
    assert len(written) == len(row.reads), f"{row}: {len(written)} numbers, {len(row.reads)} paths"
    found = [value_at(facts, path) for path in row.reads]
    return [
        f"{path}: the page says {number}, the command {value:.7g}"
        for number, path, value in zip(written, row.reads, found, strict=True)
        if abs(value - float(number.replace(",", ""))) > HALF * 10.0 ** -decimals(number)
    ]


def decimals(number: str) -> int:
    return len(number.partition(".")[2])


def value_at(facts: Any, path: str) -> float:
    """The value at a path of names and list indices, such as "workers/0/count", perhaps times a number."""
    names, _, factor = path.partition(" * ")
    for name in names.split("/"):
        facts = facts[int(name)] if isinstance(facts, list) else facts[name]
    return float(facts) * float(factor or 1.0)


def run(row: PageNumbers, folder: Path) -> dict[str, Any]:
    """Run `echo2d plan` or `simulate` in a folder with a copy of the scenarios. Returns its JSON."""
    shutil.copytree(REPO / "scenarios", folder / "scenarios")
    words = [*row.command.split(), *row.more.split()]
    assert words[0] == "echo2d", row
    (scenario,) = (folder / word for word in words if word.endswith(".toml"))
    text = scenario.read_text()
    for old, new in row.changed.items():
        assert text.count(old) == 1, f"{scenario.name} has {old!r} {text.count(old)} times"
        text = text.replace(old, new)
    scenario.write_text(text)
    arguments = [word for word in words[1:] if word != "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "echo2d", *arguments, "--json"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts
