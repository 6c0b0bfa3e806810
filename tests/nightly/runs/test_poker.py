"""Two steps of `make poker`: a tiny model is trained on hands, and plays matches."""

import subprocess
import sys
from pathlib import Path

import pytest

from examples.one_machine import read_rows
from examples.poker.matches import read_matches
from tests.support.paths import REPO

pytestmark = [pytest.mark.timeout(600)]


def test_a_tiny_model_is_trained_on_hands_and_plays_matches(tmp_path: Path) -> None:
    run = tmp_path / "poker"
    flags = (f"--run-dir={run}", "--steps=2", "--trajectories=64", "--hands=40")
    command = [sys.executable, "-m", "examples.poker.run", *flags]
    for _ in range(2):  # the second time all is there
        done = subprocess.run(
            command, cwd=REPO, capture_output=True, text=True, timeout=500, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        steps, _ = read_rows(run)
        assert [row["step"] for row in steps] == [1, 2]
        assert all(set(row["tasks"]) == {"call", "raise"} for row in steps)
        matches = read_matches(run)
        assert [(match.version, match.drawn, match.opponent) for match in matches] == [
            (version, drawn, opponent)
            for version, drawn in ((0, "sampled"), (2, "sampled"), (2, "greedy"))
            for opponent in ("call", "raise")
        ]
        for match in matches:
            assert match.hands == 40
            assert match.mean <= 20, "a stack"
            assert match.low < match.mean < match.high
            assert 0 <= match.illegal <= 4
        assert "big blinds a hand" in done.stdout
