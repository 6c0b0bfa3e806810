"""The table of planted bugs is valid: the text of each is in its file, and its tests exist."""

import pytest

from tests.support.paths import REPO
from tools.mutants import MUTANTS, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_can_be_planted(mutant: Mutant) -> None:
    source = (REPO / mutant.path).read_text()
    assert mutant.planted(source) != source
    assert all((REPO / test.partition("::")[0]).exists() for test in mutant.tests)


def test_every_invariant_has_a_mutant() -> None:
    rules = " ".join(mutant.rule for mutant in MUTANTS)
    assert all(f"I{number}" in rules for number in range(1, 9))
    assert all(f"gate {number}" in rules for number in range(1, 5))
