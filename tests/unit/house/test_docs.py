"""The documents are true: the tests that they name exist, and their limits are those of the code."""

import ast
import importlib
import re
from collections.abc import Iterator

import pytest

from echo2d.core.status.schema import ALERT_KINDS
from tests.support.paths import REPO, TEST_ROOTS
from tools.mutants import MUTANTS

SECURITY = (REPO / "docs" / "reference" / "security.md").read_text()
INVARIANTS = (REPO / "docs" / "design" / "invariants.md").read_text()
CITED_TEST = r"`((?:[a-z0-9_]+/)+test_[a-z0-9_]+\.py)::(test_[a-z0-9_]+)`"
CITED = sorted(set(re.findall(CITED_TEST, SECURITY + INVARIANTS)))
LIMITS = re.findall(
    r"^\| `([A-Z_]+)` \| ([0-9_.]+)(?: << ([0-9]+))? \| `([a-z0-9_.]+)` \|$", SECURITY, re.MULTILINE
)
OPERATING = (REPO / "docs" / "guide" / "operating.md").read_text()
TELLERS = ("echo2d/runtime/coordinator/group_log.py", "echo2d/runtime/worker/generation.py")


@pytest.mark.parametrize(("file", "name"), CITED)
def test_every_test_that_the_documents_name_exists(file: str, name: str) -> None:
    (path,) = (root / file for root in TEST_ROOTS if (root / file).exists())
    assert re.search(rf"^(async )?def {name}\(", path.read_text(), re.MULTILINE)


@pytest.mark.parametrize(("name", "value", "shift", "module"), LIMITS)
def test_every_limit_in_the_documents_has_its_value_in_the_code(
    name: str, value: str, shift: str, module: str
) -> None:
    assert getattr(importlib.import_module(module), name) == float(value) * 2 ** int(shift or 0)


def test_the_test_reads_the_rows_of_the_page() -> None:
    assert min(len(CITED), len(LIMITS)) > 30


def test_every_kind_of_line_in_the_group_log_is_explained() -> None:
    source = "".join((REPO / path).read_text() for path in TELLERS)
    said = set(
        re.findall(
            r'say\(\s*(?:group_log|story|log),\s*(?:logging\.)?(?:INFO|DEBUG|level),\s*"(\w+)"',
            source,
        )
    ) | {"buffered"}
    table = {
        word
        for row in re.findall(r"^\| (.*?) \| (?:debug|info)", OPERATING, re.MULTILINE)
        for word in row.split(", ")
    }
    assert {f"`{kind}`" for kind in said} | {"`trained`"} == table


def sections(page: str) -> dict[str, str]:
    """The text under each `## In: ...` of the page, by the invariant's number."""
    parts = re.split(r"^## (I\d): .*$", page, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_invariant_has_a_section_with_code_and_tests() -> None:
    found = sections(INVARIANTS)
    assert list(found) == [f"I{number}" for number in range(1, 9)]
    assert [name for name, text in found.items() if not re.search(CITED_TEST, text)] == []
    assert [name for name, text in found.items() if "Enforced" not in text] == []


def test_every_planted_bug_of_an_invariant_is_on_its_page() -> None:
    planted = {name: set[str]() for name in sections(INVARIANTS)}
    for mutant in MUTANTS:
        if mutant.rule[:2] in planted:
            planted[mutant.rule[:2]].add(mutant.name)
    told = {
        name: set(re.findall(r"^- (.*)$", text.partition("Planted bugs:")[2], re.MULTILINE))
        for name, text in sections(INVARIANTS).items()
    }
    assert told == planted


def test_every_alert_is_explained() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `.*` \| .* \|$", OPERATING, re.MULTILINE)
    assert sorted(rows) == sorted(ALERT_KINDS)


# Call them with a kind and a sentence.
MAKERS = {"Alert", "about"}


def sentences(path: str) -> Iterator[str]:
    """The first fixed part, of some length, of every sentence of an alert that is made there."""
    for node in ast.walk(ast.parse((REPO / path).read_text())):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in MAKERS
        ):
            parts = [
                each.value for each in ast.walk(node.args[1]) if isinstance(each, ast.Constant)
            ]
            yield next((part for part in parts if isinstance(part, str) and len(part) > 8), "")


def test_every_sentence_of_the_status_is_explained() -> None:
    """By its beginning."""
    said = list(sentences("echo2d/core/coordinator/alerts.py"))
    assert len(said) == 30
    assert [each for each in said if each.split(":")[0][:20].strip() not in OPERATING] == []
