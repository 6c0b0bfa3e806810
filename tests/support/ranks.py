"""Learners on recorded batches: one process, or several ranks that torchrun starts."""

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

from echo2d.client import Batch
from echo2d.learner.config import LearnerConfig
from tests.support.free_port import free_port
from tests.support.learner import config_in, learn, write_config
from tests.support.paths import REPO
from tests.support.recorded_learner import Recording

RANKS = 2
STEPS = 6
# Absolute, for losses around 0.1: ranks add float32 numbers in another order, over twelve optimizer
# steps.
LOSS_ERROR_MAX = 1e-5
# As a module, not as a file: a file's folder comes first on sys.path, and tests/support has a
# learner.py.
PROGRAM = ("--module", "tests.support.recorded_learner")


def config_of(directory: Path, base: Path, **changes: Any) -> LearnerConfig:
    """A config under which the rows of a batch do not divide evenly: one rank has less to do."""
    choices: dict[str, Any] = {
        "optimizer_steps": 2,
        "proximal": "recomputed",
        "kl_coef": 0.05,
        "warmup_steps": 0,
    }
    uneven = {"steps": STEPS, "checkpoint_every": 2, "micro_batch_tokens": 60, **choices, **changes}
    return config_in(directory, base, **uneven)


def alone(directory: Path, config: LearnerConfig, batches: list[Batch]) -> None:
    """Train in this process, resumed from the newest checkpoint."""
    learn(config, Recording(directory, batches), resume=True)


def together(
    directory: Path,
    config: LearnerConfig,
    batches: list[Batch],
    *,
    ranks: int = RANKS,
    hosts: int = 1,
) -> "subprocess.CompletedProcess[str]":
    """Train in some ranks, resumed from the newest checkpoint. hosts: how many torchruns start them; to the learner
    each is a host. Returns how the first torchrun ended.
    """
    (directory / "batches.pickle").write_bytes(pickle.dumps(batches))
    path = write_config(directory / "run.toml", config)
    torchrun = [
        sys.executable,
        "-m",
        "echo2d.learner.torchrun",
        f"--nproc-per-node={ranks // hosts}",
    ]
    learner = [*PROGRAM, str(directory), "--config", str(path), "--resume"]
    environment = {**os.environ, "PYTHONPATH": str(REPO)}  # the ranks import tests.support
    meeting = f"127.0.0.1:{free_port()}"
    meet = ["--nnodes", str(hosts), "--rdzv-backend", "c10d", "--rdzv-endpoint", meeting]
    others = [
        subprocess.Popen(
            [*torchrun, *meet, "--rdzv-conf", "is_host=false", *learner], env=environment
        )
        for _ in range(1, hosts)
    ]
    try:
        return subprocess.run(
            [*torchrun, *meet, "--rdzv-conf", "is_host=true", *learner],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )
    finally:
        for other in others:
            other.wait(60.0)
