"""The learner's gradients are TRL's, in every recipe that TRL has too."""

import json
import subprocess
from pathlib import Path

from tests.support.learner import make_base
from tests.support.paths import REPO, TRL_ENVIRONMENT

TRL_S = 300.0
# Float32 sums in another order: 5e-7 when this was written.
DIFFERENCE_MAX = 5e-6
# Two recipes that differ less than this would not be told apart.
APART_MIN = 1e-3


def test_every_recipe_has_the_gradient_of_trl(tmp_path: Path) -> None:
    """The learner's defaults agree too: the deviation of a sample, KL weighed by importance, dual clip at 3."""
    model = make_base(tmp_path, layers=2)
    python = TRL_ENVIRONMENT / "venv" / "bin" / "python"
    ended = subprocess.run(
        [python, "-m", "tests.support.trl_gradients", model],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=TRL_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    print(json.dumps(found, indent=1))  # noqa: T201 - what `pytest -rP` shows
    assert {name for name, far in found["from_trl"].items() if far > DIFFERENCE_MAX} == set()
    assert {name for name, far in found["apart"].items() if far < APART_MIN} == {"token mean"}
    assert found["advantages"] < 1e-6
