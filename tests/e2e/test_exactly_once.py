"""A learner killed at any moment, again and again, trains what one does that nobody kills (I4).

Lives are forks of this process, so that a start costs no import of torch; what is killed is a process nevertheless.
The batches come from a recording: they do not depend on what the learner does.
"""

import os
import random
import signal
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from echo2d.client import Coordinator
from learner.batch.prefetch import BatchPrefetch
from learner.config import LearnerConfig
from learner.train import Learner
from tests.support.learner import config_in, make_base, record, rows_of, throwing_dice
from tests.support.recorded_learner import Recording

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

STEPS = 60  # more than all lives that are killed come to
KILLS = 10
LIFE_S_MAX = 60.0
LOSS_ERROR_MAX = 1e-6


def config_of(directory: Path, base: Path) -> LearnerConfig:
    directory.mkdir()
    model = throwing_dice(base, directory / "model")
    choices: dict[str, Any] = {"optimizer_steps": 2, "proximal": "recomputed", "step_floor_s": 0.02}
    return config_in(directory, model, steps=STEPS, checkpoint_every=3, **choices)


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


def test_ten_kills_change_nothing(tmp_path: Path) -> None:
    rng_seed = random.randrange(1 << 32)
    print(f"rng_seed={rng_seed}")  # noqa: T201 - shown when it fails
    rng = random.Random(rng_seed)
    base = make_base(tmp_path / "models")
    batches = record(base, STEPS)
    straight, struck = (config_of(tmp_path / name, base) for name in ("straight", "struck"))
    run_to_the_end(straight, Recording(tmp_path / "straight", batches, publish_every=4))

    recording = Recording(tmp_path / "struck", batches, publish_every=4)
    for _ in range(KILLS):
        live_and_kill(struck, recording, rng)
    run_to_the_end(struck, recording)

    expected = {row["step"]: row for row in rows_of(straight)}
    found = defaultdict(list)
    for row in rows_of(struck):
        found[row["step"]].append(row)
    assert list(expected) == sorted(found) == list(range(1, STEPS + 1))
    for step, each in found.items():
        for row in each:  # also those that were trained again
            assert row["batch"] == expected[step]["batch"]
            assert row["loss"] == pytest.approx(expected[step]["loss"], abs=LOSS_ERROR_MAX)
    committed_in_order(recording.lines())


def committed_in_order(lines: list[list[Any]]) -> None:
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
    assert step == STEPS
    assert all(len(each) == 1 for each in digests.values())
    assert sum(line[0] == "session" for line in lines) <= KILLS + 1
