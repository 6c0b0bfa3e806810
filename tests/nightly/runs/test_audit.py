"""`echo2d bench liars` in a short form: real workers lie, and are convicted before much is trained on."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.alone, pytest.mark.timeout(900)]
LIES = "made_up,made_up_true_logprobs,greedy"


def test_liars_are_convicted_and_honest_workers_are_not(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "echo2d", "bench", "liars", f"--lies={LIES}", "--json"]
    command += ["--seconds=300", f"--out={tmp_path / 'run'}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)["rows"]}
    for lie in LIES.split(","):
        assert rows[f"liar-{lie}"]["verdict"], rows
    assert not any(row["verdict"] for row in rows.values() if not row["lie"])
    # The liars were told, and their processes have ended with one clear line.
    log = (tmp_path / "run" / "logs" / "liar-made_up.log").read_text()
    assert "an audit found that this worker's answers are not the model's" in log
    shown = [sys.executable, "-m", "echo2d", "audit", "show", "liar-made_up", "--run-dir"]
    told = subprocess.run(
        [*shown, str(tmp_path / "run" / "coordinator")], capture_output=True, text=True, check=True
    )
    assert "convicted" in told.stdout
    assert "last flagged answers" in told.stdout


def test_liars_in_an_environment_are_convicted_and_honest_workers_are_not() -> None:
    command = [sys.executable, "-m", "echo2d", "bench", "liars", "--episodes", "--lies=greedy"]
    command += ["--liars-from=3", "--seconds=300", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["name"] for row in rows if row["verdict"]] == ["liar-greedy"]
