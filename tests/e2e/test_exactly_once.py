"""A learner that is killed at any moment, again and again, trains the same as one that is never killed (I4).

The lives of a learner of one rank are forks of this process, so that a start needs no import of torch. torchrun starts
those of several ranks, and all of its processes are killed. The batches come from a recording: they do not depend on
what the learner does.
"""

import contextlib
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from echo2d.client import Coordinator
from echo2d.learner.batch.prefetch import BatchPrefetch
from echo2d.learner.config import LearnerConfig
from echo2d.learner.train import Learner
from tests.support.learner import (
    config_in,
    make_base,
    record,
    rows_of,
    throwing_dice,
    write_config,
)
from tests.support.paths import REPO
from tests.support.polling import START_S, poll
from tests.support.processes import is_running
from tests.support.ranks import PROGRAM
from tests.support.recorded_learner import Recording

pytestmark = [pytest.mark.timeout(900)]

STEPS = 60  # more than all lives that are killed come to
KILLS = 10
LIFE_S_MAX = 60.0
LOSS_ERROR_MAX = 1e-6
# By ranks: kills, and more steps than all lives that are killed come to. torchrun takes seconds to start.
OF_RANKS = {2: (3, 30), 4: (2, 20)}


def config_of(directory: Path, base: Path, steps: int = STEPS) -> LearnerConfig:
    directory.mkdir()
    model = throwing_dice(base, directory / "model")
    choices: dict[str, Any] = {"optimizer_steps": 2, "proximal": "recomputed", "step_floor_s": 0.02}
    return config_in(directory, model, steps=steps, checkpoint_every=3, **choices)


def live(config: LearnerConfig, recording: Recording) -> int:
    """A new process with a learner that goes on; its process id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        torch.set_num_threads(1)
        Learner(config, cast("Coordinator", recording), BatchPrefetch(), resume=True).run()
        code = 0
    finally:
        os._exit(code)


def ended(child: int) -> int | None:
    """Its exit code, None while it lives."""
    found, status = os.waitpid(child, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def run_to_the_end(config: LearnerConfig, recording: Recording) -> None:
    assert os.waitpid(live(config, recording), 0)[1] == 0


def live_and_kill(config: LearnerConfig, recording: Recording, rng: random.Random) -> None:
    """A life that ends some moments after the first to sixth step that it trains."""
    steps, delay_s = rng.randint(0, 5), rng.uniform(0.0, 0.05)
    before, child = len(rows_of(config)), live(config, recording)
    deadline = time.monotonic() + LIFE_S_MAX
    while len(rows_of(config)) < before + steps and time.monotonic() < deadline:
        assert ended(child) is None, "it ended before it was killed"
        time.sleep(0.002)
    time.sleep(delay_s)
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def dice() -> random.Random:
    rng_seed = random.randrange(1 << 32)
    print(f"rng_seed={rng_seed}")  # noqa: T201 - shown when it fails
    return random.Random(rng_seed)


def test_ten_kills_of_a_learner_change_nothing_in_what_is_trained(tmp_path: Path) -> None:
    rng = dice()
    base = make_base(tmp_path / "models")
    batches = record(base, STEPS)
    straight, struck = (config_of(tmp_path / name, base) for name in ("straight", "struck"))
    run_to_the_end(straight, Recording(tmp_path / "straight", batches, publish_every=4))

    recording = Recording(tmp_path / "struck", batches, publish_every=4)
    for _ in range(KILLS):
        live_and_kill(struck, recording, rng)
    run_to_the_end(struck, recording)

    trained_alike(straight, struck)
    committed_in_order(recording.lines(), STEPS, KILLS)


def torchrun(directory: Path, config: LearnerConfig, ranks: int) -> "subprocess.Popen[bytes]":
    """A life of a learner of several ranks, resumed, with its output in a file."""
    command = [
        "-m",
        "echo2d.learner.torchrun",
        "--standalone",
        f"--nproc-per-node={ranks}",
        *PROGRAM,
    ]
    path = write_config(directory / "run.toml", config)
    with (directory / "log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, *command, str(directory), "--config", str(path), "--resume"],
            env={**os.environ, "PYTHONPATH": str(REPO)},  # it needs this test's neighbours
            stdout=log,
            stderr=log,
        )


def run_ranks_to_the_end(directory: Path, config: LearnerConfig, ranks: int) -> None:
    life = torchrun(directory, config, ranks)
    assert life.wait(START_S) == 0, (directory / "log").read_text()


def kill_all_ranks(directory: Path, config: LearnerConfig, ranks: int, rng: random.Random) -> None:
    """A life in which torchrun and all ranks are killed, some moments after the first to fifth step that they train."""
    steps, delay_s, before = rng.randint(1, 5), rng.uniform(0.0, 0.05), len(rows_of(config))
    files = [directory / f"pid-{rank}" for rank in range(ranks)]
    for file in files:
        file.unlink(missing_ok=True)
    life = torchrun(directory, config, ranks)

    def trained() -> bool:
        assert life.poll() is None, (directory / "log").read_text()
        return len(rows_of(config)) >= before + steps

    poll(trained, interval_s=0.005)
    time.sleep(delay_s)
    pids = [int(file.read_text()) for file in files]
    rng.shuffle(pids)
    for pid in (life.pid, *pids):
        # A rank may have ended by itself, because it lost another one.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert life.wait() == -signal.SIGKILL
    poll(lambda: not any(map(is_running, pids)))


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", OF_RANKS)
def test_kills_of_all_ranks_change_nothing_in_what_is_trained(tmp_path: Path, ranks: int) -> None:
    (kills, steps), rng = OF_RANKS[ranks], dice()
    base = make_base(tmp_path / "models", layers=2)
    batches = record(base, steps)
    straight, struck = (config_of(tmp_path / name, base, steps) for name in ("straight", "struck"))
    for name in ("straight", "struck"):
        (tmp_path / name / "batches.pickle").write_bytes(pickle.dumps(batches))
    run_ranks_to_the_end(tmp_path / "straight", straight, ranks)
    for _ in range(kills):
        kill_all_ranks(tmp_path / "struck", struck, ranks, rng)
    run_ranks_to_the_end(tmp_path / "struck", struck, ranks)
    trained_alike(straight, struck)
    committed_in_order(Recording(tmp_path / "struck", batches).lines(), steps, kills)


def trained_alike(straight: LearnerConfig, struck: LearnerConfig) -> None:
    """Every step had the same batch and the same loss in each life that trained it."""
    expected = {row["step"]: row for row in rows_of(straight)}
    found = defaultdict(list)
    for row in rows_of(struck):
        found[row["step"]].append(row)
    assert list(expected) == sorted(found) == list(range(1, straight.steps + 1))
    for step, each in found.items():
        for row in each:  # also those that were trained again
            assert row["batch"] == expected[step]["batch"]
            assert row["loss"] == pytest.approx(expected[step]["loss"], abs=LOSS_ERROR_MAX)


def committed_in_order(lines: list[list[Any]], steps: int, kills: int) -> None:
    """Each session commits without a gap from where it resumed, a step always with the same digest."""
    digests: dict[int, set[str]] = defaultdict(set)
    step = 0
    for what, number, *rest in lines:
        if what == "session":
            assert number <= step
            step = number
        elif what == "commit":
            assert number == step + 1
            step = number
            digests[step].add(rest[0])
    assert step == steps
    assert all(len(each) == 1 for each in digests.values())
    assert sum(line[0] == "session" for line in lines) <= kills + 1
