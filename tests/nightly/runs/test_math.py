"""A few steps of `make math`: a real language model, stopped and started again."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from examples.math.figure import read_scores
from examples.one_machine import CACHE, read_rows
from examples.smollm2 import model_directory
from tests.support.paths import REPO
from tests.support.polling import poll

pytestmark = [pytest.mark.timeout(900)]

STEPS = 3
SETTINGS = (
    "policy.trajectories_per_step=24",
    "policy.group_size=12",
    "eval.rows=4",
)


@pytest.fixture(scope="module", autouse=True)
def _model() -> None:
    try:
        model_directory(CACHE)
    except SystemExit as fault:
        pytest.skip(f"SmolLM2 cannot be had here: {fault}")


def start(run: Path) -> "subprocess.Popen[str]":
    flags = (f"--run-dir={run}", f"--steps={STEPS}", f"--every={STEPS}")
    settings = (f"--set={setting}" for setting in SETTINGS)
    return subprocess.Popen(
        [sys.executable, "-m", "examples.math.run", *flags, *settings],
        cwd=REPO,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_real_model_trains_and_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    run = tmp_path / "math"
    first = start(run)
    poll(lambda: bool(read_rows(run)[0]) or first.poll() is not None, timeout_s=600)
    first.send_signal(signal.SIGINT)
    output, _ = first.communicate(timeout=300)
    assert f"stopped; `make math` goes on with {run}" in output, output
    trained = {row["step"]: row["batch"] for row in read_rows(run)[0]}
    assert 1 in trained
    saved = max(
        int(path.name.split("-")[1]) for path in (run / "learner" / "checkpoints").iterdir()
    )
    assert saved == max(trained), "the step at hand was saved"

    second = start(run)
    output, _ = second.communicate(timeout=600)
    assert second.returncode == 0, output
    steps, _ = read_rows(run)
    assert {row["step"] for row in steps} == set(range(1, STEPS + 1))
    # A step that is trained again is trained on the same batch.
    assert all(row["batch"] == trained[row["step"]] for row in steps if row["step"] in trained)
    scores = {(score.name, score.version): score for score in read_scores(run)}
    assert set(scores) == {(name, at) for name in ("sampled", "greedy") for at in (0, STEPS)}
    assert all(score.questions == 4 for score in scores.values())
    assert (run / "accuracy.png").exists()
    assert "sampled, 4 questions x 8" in output
