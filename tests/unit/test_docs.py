"""What the documents say is so: the tests they name exist, the limits they give are those of the code."""

import importlib
import re
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
SECURITY = (REPO / "docs" / "security.md").read_text()
CITED = sorted(set(re.findall(r"`([a-z0-9_]+/test_[a-z0-9_]+\.py)::(test_[a-z0-9_]+)`", SECURITY)))
LIMITS = re.findall(r"^\| `([A-Z_]+)` \| ([0-9_.]+)(?: << ([0-9]+))? \| `([a-z0-9_.]+)` \|$", SECURITY, re.MULTILINE)


@pytest.mark.parametrize(("file", "name"), CITED)
def test_every_test_that_is_named_exists(file: str, name: str) -> None:
    assert re.search(rf"^(async )?def {name}\(", (REPO / "tests" / file).read_text(), re.MULTILINE)


@pytest.mark.parametrize(("name", "value", "shift", "module"), LIMITS)
def test_every_limit_has_the_value_given(name: str, value: str, shift: str, module: str) -> None:
    assert getattr(importlib.import_module(module), name) == float(value) * 2 ** int(shift or 0)


def test_the_page_was_read() -> None:
    assert min(len(CITED), len(LIMITS)) > 30
