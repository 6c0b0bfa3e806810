"""Two steps of `make calculator`: a real language model calls a tool and reads its result."""

import subprocess
import sys
from pathlib import Path

import pytest

from examples.calculator.held_out import read_scores
from examples.one_machine import CACHE, read_rows
from examples.smollm2 import model_directory
from tests.support.paths import REPO

pytestmark = [pytest.mark.timeout(900)]

STEPS = 2
QUESTIONS = 4


@pytest.fixture(scope="module", autouse=True)
def _model() -> None:
    try:
        model_directory(CACHE)
    except SystemExit as fault:
        pytest.skip(f"SmolLM2 cannot be had here: {fault}")


def test_a_real_model_is_trained_on_episodes_with_a_tool(tmp_path: Path) -> None:
    run = tmp_path / "calculator"
    flags = (f"--run-dir={run}", f"--steps={STEPS}", f"--every={STEPS}")
    less = ("--trajectories=24", f"--questions={QUESTIONS}")
    done = subprocess.run(
        [sys.executable, "-m", "examples.calculator.run", *flags, *less],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    steps, _ = read_rows(run)
    assert [row["step"] for row in steps] == [1, 2]
    for row in steps:
        # The rewards of a group differ, so somebody in it called the tool or was right without it.
        parts = row["tasks"]["calculator"]["parts"]
        assert parts["right"] > 0 or parts["call"] > 0
        # A policy that wrote a second answer had read the tool's result.
        assert (row["turns"] > 1) == (row["given_tokens"] > 0)
    assert any(row["turns"] > 1 for row in steps)
    scores = read_scores(run)
    assert [(score.version, score.name) for score in scores] == [
        (version, name) for version in (0, STEPS) for name in ("sampled", "greedy")
    ]
    assert all(score.questions == QUESTIONS for score in scores)
    assert (run / "accuracy.png").exists()
    assert "well-formed call" in done.stdout
