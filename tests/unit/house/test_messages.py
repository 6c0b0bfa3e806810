"""The messages that docs/guide quotes are those of the code."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.paths import REPO

GUIDE = REPO / "docs" / "guide"
PAGES = {"troubleshooting.md": 45, "rewards.md": 13}
# A shorter piece would be found in any text.
PIECE_CHARS_MIN = 6


def texts(source: str) -> Iterator[str]:
    """Its texts as they are printed; a gap stands for what an f-string puts in."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                str(each.value) if isinstance(each, ast.Constant) else "\0" for each in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@cache
def said() -> str:
    files = [*(REPO / "echo2d").rglob("*.py"), *(REPO / "learner").rglob("*.py")]
    return "\n".join(text for file in sorted(files) for text in texts(file.read_text()))


def messages(page: str) -> list[str]:
    """The first cells of tables whose title is "message"."""
    tables = re.findall(r"^\| message \|.*\n\|[ |-]+\n((?:\|.*\n)+)", page, re.MULTILINE)
    return re.findall(r"^\| `(.+?)` \|", "".join(tables), re.MULTILINE)


def gone(message: str) -> list[str]:
    """Its constant pieces that no program says."""
    pieces = [piece.strip(" ;:,.") for piece in message.split("...")]
    found = [piece for piece in pieces if len(piece) >= PIECE_CHARS_MIN] or [max(pieces, key=len)]
    return [piece for piece in found if piece not in said()]


@pytest.mark.parametrize("page", PAGES)
def test_every_quoted_message_is_one_of_the_code(page: str) -> None:
    quoted = messages(Path(GUIDE / page).read_text())
    assert len(quoted) >= PAGES[page]
    assert {message: gone(message) for message in quoted if gone(message)} == {}


def test_a_quoted_message_that_no_code_prints_is_found() -> None:
    assert gone("coordinator.port: ... is in " + "usage") == ["is in " + "usage"]
    assert list(texts('f"a {b} c" "d"')) == ["a \0 cd", "a ", " cd"]
