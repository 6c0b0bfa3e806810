"""`echo2d run`: a whole run on one machine, on a user's own rows and scorer, from five typed lines."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import csv as csv_file
from pyarrow import parquet

from echo2d.client import Coordinator
from echo2d.demo.results import read_rows
from echo2d.demo.tiny_model import make_tiny_model
from echo2d.runtime.run_dir.run_directory import find_coordinator
from tests.support.free_port import free_port
from tests.support.local_hub import LocalHub, commit_of, local_hub
from tests.support.polling import START_S, poll
from tests.support.rows_site import write_own_questions

pytestmark = [pytest.mark.timeout(600)]

STEPS = 3
AS_TEXT = csv_file.ConvertOptions(column_types=dict.fromkeys(("digits", "sorted"), pa.string()))
ECHO2D = (sys.executable, "-m", "echo2d")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What the operator has: a model, rows, and a scorer in two files."""
    write_own_questions(tmp_path, make_tiny_model(Path.home() / ".cache" / "echo2d"))
    return tmp_path


def init(folder: Path, *more: str, env: Mapping[str, str] | None = None) -> Path:
    words = ["--yes", "--host=127.0.0.1", "--base-model=base", "--rows=rows.csv", "--prompt=digits"]
    of_rows = ["--answer=sorted", "--scorer=judge:score", "--max-new-tokens=12"]
    settings = [
        "policy.trajectories_per_step=32", f"coordinator.port={free_port()}", "link.port=0", f"learner.steps={STEPS}",
        "learner.checkpoint_every=1", "learner.threads=1", "learner.eval_wait_s=0",
    ]  # fmt: skip
    sets = [f"--set={each}" for each in settings]
    subprocess.run(
        [*ECHO2D, "init", *words, *of_rows, *sets, *more],
        cwd=folder,
        check=True,
        timeout=START_S,
        env={**os.environ, **(env or {})},
    )
    return folder / "run" / "run.toml"


@contextmanager
def running(config: Path, log: Path, *more: str) -> Iterator[subprocess.Popen[bytes]]:
    """From another folder, as a service would."""
    with (
        log.open("wb") as sink,
        subprocess.Popen(
            [*ECHO2D, "run", f"--config={config}", *more],
            cwd="/",
            stderr=sink,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        ) as program,
    ):
        try:
            yield program
        finally:
            program.kill()


def steps(config: Path) -> list[int]:
    path = config.parent / "learner" / "metrics.jsonl"
    return [row["step"] for row in read_rows(path) if "loss" in row] if path.exists() else []


def test_a_run_with_a_users_rows_and_scorer_trains_and_resumes(folder: Path) -> None:
    config = init(folder)
    config.write_text(config.read_text() + "\n[worker]\nslots = 3\n")
    log = folder / "log"
    with running(config, log) as program:
        poll(lambda: bool(steps(config)) or program.poll() is not None)
        url, token = find_coordinator(config.parent / "coordinator")
        with Coordinator(url, token_file=token) as coordinator:
            (worker,) = coordinator.status()["workers"]
        assert worker["slots"] == 3
        assert program.wait(4 * START_S) == 0, log.read_text()[-3000:]
    assert steps(config) == list(range(1, STEPS + 1))
    said = log.read_text()
    assert "coordinator " in said
    assert "a new run begins" in said
    assert "worker-1 " in said
    assert "learner " in said
    assert "the learner has made its last step" in said
    # The same command, with more steps to make, after one Ctrl-C.
    with running(config, log, "--set=learner.steps=10000") as program:
        poll(lambda: len(steps(config)) > STEPS)
        program.send_signal(signal.SIGINT)
        assert program.wait(START_S) == 0, log.read_text()[-3000:]
    assert "goes on run=" in log.read_text()
    made = steps(config)
    assert made == list(range(1, len(made) + 1))
    left = subprocess.run(["pgrep", "-f", str(config)], capture_output=True, check=False)
    assert left.stdout == b"", "no program is left"


@pytest.mark.nightly
def test_a_run_with_a_model_and_rows_of_the_hub_is_pinned_to_their_commits(folder: Path) -> None:
    rows = folder / "rows" / "main"
    rows.mkdir(parents=True)
    table = csv_file.read_csv(folder / "rows.csv", convert_options=AS_TEXT)
    parquet.write_table(table, rows / "train-00000-of-00001.parquet")
    folders = {
        "models/o/base": {"main": folder / "base"},
        "datasets/o/sums": {"main": folder / "rows"},
    }
    with local_hub(LocalHub(folders)) as hub:
        env = {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "hub")}
        config = init(folder, "--base-model=o/base", "--rows=o/sums:main/train", env=env)
    text = config.read_text()
    assert f"models--o--base/snapshots/{commit_of('models/o/base', 'main')}" in text
    assert f"{commit_of('datasets/o/sums', 'main')}/main/train-00000-of-00001.parquet" in text
    log = folder / "log"
    with running(config, log) as program:
        assert program.wait(4 * START_S) == 0, log.read_text()[-3000:]
    assert steps(config) == list(range(1, STEPS + 1))


@pytest.mark.nightly
def test_a_killed_process_is_restarted_and_an_operators_mistake_ends_the_run(folder: Path) -> None:
    config = init(folder)
    log = folder / "log"
    with running(config, log, "--set=learner.steps=10000", "--workers=2") as program:
        poll(lambda: len(steps(config)) > 1)
        for word in ("worker-1", "learn", "coordinate"):
            found = subprocess.run(
                ["pgrep", "-f", f"echo2d.*{word}.*{folder.name}"], capture_output=True, check=False
            )
            os.kill(int(found.stdout.split()[0]), signal.SIGKILL)
            before = len(steps(config))
            poll(lambda before=before: len(steps(config)) > before + 1)  # type: ignore[misc]
        assert log.read_text().count("it starts again in 1 s") == 3
        program.send_signal(signal.SIGKILL)
        program.wait()
    poll(
        lambda: (
            subprocess.run(["pgrep", "-f", str(config)], capture_output=True, check=False).stdout
            == b""
        )
    )
    (folder / "judge.py").write_text(
        "def score(answer, expected):\n    raise ValueError('broken')\n"
    )
    shutil.rmtree(config.parent / "coordinator" / "versions", ignore_errors=True)
    again = (
        init(folder, "--out=other", "--set=task.options.scorer=exact").parents[1]
        / "other"
        / "run.toml"
    )
    again.write_text(again.read_text().replace('scorer = "exact"', 'scorer = "judge:score"'))
    with running(again, log) as program:
        assert program.wait(4 * START_S) == 2
    last = log.read_text().splitlines()[-1]
    assert last.startswith(
        "echo2d: the coordinator ended with 2: the rewards of task 'rows' do not come: error: row "
    )
    assert f"ValueError: broken ({folder}/judge.py:2 in score)" in last
