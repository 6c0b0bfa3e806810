"""One optimizer step of echo2d and of TRL has the same gradient in every recipe that both have.

The recipes and their settings are in `tests/support/trl_recipes.py`, the two steps in `tests/support/trl_gradients.py`,
which TRL's environment runs. No setting is needed for three defaults in which an earlier comparison found a difference:
advantages are divided by the deviation of a sample, the KL term is weighed by the importance ratio, and the clip is
two-sided. TRL's two-sided clip is off unless `delta` is given. echo2d's `correction` is `tis` by default, which TRL
does not have beside its clip, so recipes that clip the rollout's ratio set it to `none`.
"""

import json
import subprocess
from typing import Any

import numpy as np
import pytest

from tests.support.paths import REPO, TRL_ENVIRONMENT
from tests.support.trl_recipes import RECIPES, UNEQUAL

DIFFERENCE_MAX = 1e-5  # both sides compute in float32, in another order
DIFFERENT = 0.04
UNLIKE = [
    ("the default", "one-sided clip"),
    ("the default", "clip-higher"),
    ("the default", "mean over answers"),
    ("the default", "entropy"),
    ("gspo", "gspo with a wide clip"),
    ("cispo", "cispo with a low cap"),
    ("kl", "kl without weights"),
    ("kl without weights", "the default"),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the two sides found, by recipe."""
    directory = tmp_path_factory.mktemp("trl") / "base"
    python = TRL_ENVIRONMENT / "venv" / "bin" / "python"
    ended = subprocess.run(
        [str(python), "-m", "tests.support.trl_gradients", str(directory)],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    facts: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    for recipe, each in facts.items():
        off, micro_batches = each["differences"][recipe], each["micro_batches"]
        print(f"{recipe}: {off:.1e} in {micro_batches} micro-batches")  # noqa: T201
    return facts


def test_every_recipe_was_compared(found: dict[str, Any]) -> None:
    assert found.keys() == (RECIPES | UNEQUAL).keys()


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_gradients_of_echo2d_and_trl_are_equal(found: dict[str, Any], recipe: str) -> None:
    assert found[recipe]["micro_batches"] > 3
    assert found[recipe]["differences"][recipe] <= DIFFERENCE_MAX


@pytest.mark.parametrize(("recipe", "other"), UNLIKE)
def test_another_recipe_has_another_gradient(
    found: dict[str, Any], recipe: str, other: str
) -> None:
    """So the batch has tokens that tell the recipes apart."""
    assert found[recipe]["differences"][other] > DIFFERENT


@pytest.mark.parametrize("recipe", UNEQUAL)
def test_an_intended_difference_of_gradients_is_small(found: dict[str, Any], recipe: str) -> None:
    assert 0.01 < found[recipe]["differences"][recipe] < 0.2


@pytest.mark.parametrize("recipe", [*RECIPES, *UNEQUAL])
def test_the_advantages_of_echo2d_and_trl_are_equal(found: dict[str, Any], recipe: str) -> None:
    ours, theirs = map(np.array, found[recipe]["advantages"])
    assert np.abs(theirs).max() > 1.0
    assert ours == pytest.approx(theirs, abs=1e-6)


@pytest.mark.parametrize("recipe", [name for name in RECIPES if not name.startswith("cispo")])
def test_the_losses_of_echo2d_and_trl_are_equal(found: dict[str, Any], recipe: str) -> None:
    """Except for CISPO: TRL shows its loss with the logarithm, echo2d the surrogate of every recipe."""
    ours, theirs = found[recipe]["losses"]
    assert ours == pytest.approx(theirs, rel=1e-4)
