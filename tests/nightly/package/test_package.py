"""The built wheel trains in an empty environment outside the clone, with the newest packages and with the lowest.

The newest packages are those that pip chooses, the lowest those that pyproject.toml declares. No constraint is used,
not even one of this machine's pip. So torch comes with its CUDA libraries: 3 GB to download and 6 GB of disk for each.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from echo2d.demo.results import read_rows
from tests.support.distribution import build_distribution, lowest_requirements
from tests.support.free_port import free_port
from tests.support.rows_site import write_own_questions

pytestmark = [pytest.mark.timeout(1200)]

DEMO_STEPS, RUN_STEPS = 6, 3
# Their packages are small and fit each other. `sglang` and `verifiers` are tested in environments of their own.
SMALL = (
    "rows",
    "math",
    "gym",
    "poker",
    "turns",
    "remote",
    "plot",
    "tensorboard",
    "wandb",
    "mlflow",
    "trackio",
    "tinker",
)
EXTRAS = ("torch", *SMALL)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_distribution(tmp_path_factory.mktemp("built"))


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[Path]:
    """An empty one. It is removed at the end, because pytest keeps the folders of three runs."""
    made = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(made)], check=True)
    yield made
    shutil.rmtree(made)


def call(environment: Path, cwd: Path, *words: str) -> str:
    """What a program of the environment prints. Of this test's own variables it sees those of pip alone."""
    pip = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    seen = {"PATH": f"{environment / 'bin'}:/usr/bin:/bin", "HOME": str(cwd)}
    free = {"PIP_CONSTRAINT": os.devnull, "PIP_NO_CACHE_DIR": "1"}
    done = subprocess.run(
        words, cwd=cwd, env={**pip, **free, **seen}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{' '.join(words)}: {done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.parametrize("choice", ["newest", "lowest"])
def test_the_wheel_trains_in_an_empty_environment(
    choice: str, wheel: Path, environment: Path, tmp_path: Path
) -> None:
    lowest = lowest_requirements(wheel, EXTRAS) if choice == "lowest" else ()
    install = ("python", "-m", "pip", "install", "--quiet", "--no-compile", "--prefer-binary")
    call(environment, tmp_path, *install, f"{wheel}[{','.join(EXTRAS)}]", *lowest)
    call(environment, tmp_path, "python", "-m", "pip", "check")
    demo = ("echo2d", "demo", f"--steps={DEMO_STEPS}", "--workers=2", "--json", "--run-dir=demo")
    assert json.loads(call(environment, tmp_path, *demo))["steps"] == DEMO_STEPS

    (model,) = (tmp_path / ".cache" / "echo2d").glob("tiny-*")
    write_own_questions(tmp_path, model)
    asked = ["--yes", "--host=127.0.0.1", f"--port={free_port()}", "--base-model=base"]
    asked += ["--rows=rows.csv", "--prompt=digits", "--answer=sorted", "--scorer=judge:score"]
    settings = ["policy.trajectories_per_step=32", "link.port=0", f"learner.steps={RUN_STEPS}"]
    sets = [f"--set={each}" for each in settings]
    call(environment, tmp_path, "echo2d", "init", *asked, "--max-new-tokens=12", *sets)
    call(environment, tmp_path, "echo2d", "run", "--config=run/run.toml")
    rows = read_rows(tmp_path / "run" / "learner" / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, RUN_STEPS + 1))
