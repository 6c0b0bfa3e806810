"""The Tinker API with a worker whose engine is a server: what the official client and a recipe get from it."""

import json
import os
import random
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from echo2d.demo.processes import start_worker
from tests.support.engine_harness import save_random_model, tiny_config
from tests.support.odd_tokenizers import Folder
from tests.support.paths import REPO, TINKER_ENVIRONMENT
from tests.support.tinker_recipes import BASE_MODEL, CONTEXT_TOKENS, make_shadow, run_recipe
from tests.support.tinker_run import TinkerRun, tinker_run

# A server starts in half a minute on a quiet machine.
CLIENT_S = 500.0
CLOSE = 1e-4
# As in `tests/support/tinker_samples.py`, which only the client's environment can import.
TOKENS_MAX, COUNT = 24, 4
RECIPE = (
    "renderer_name=role_colon", "env=arithmetic", "group_size=4", "groups_per_batch=4", "max_tokens=8", "max_steps=2",
)  # fmt: skip


def server_model(directory: Path) -> Path:
    """A random model of widths that servers compute on a CPU."""
    Folder("qwen3", random.Random(0)).write(directory)
    widths = {"intermediate_size": 64, "head_dim": 32, "initializer_range": 0.05}
    config = tiny_config(vocab_size=512, max_position_embeddings=CONTEXT_TOKENS, **widths)
    save_random_model(directory, config, rng_seed=1)
    return directory


def draw(run: TinkerRun, home: Path, key: str) -> dict[str, Any]:
    """What `tinker_samples` is told by this run."""
    ended = subprocess.run(
        [
            str(TINKER_ENVIRONMENT / "venv" / "bin" / "python"),
            *("-m", "tests.support.tinker_samples", run.url, BASE_MODEL),
        ],
        cwd=REPO,
        env={"PATH": os.defpath, "HOME": str(home), "TINKER_API_KEY": key},
        capture_output=True,
        text=True,
        timeout=CLIENT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def check_drawn(told: dict[str, Any]) -> None:
    """Each sampler draws from its own weights."""
    for name in ("base", "first", "greedy", "second"):
        for each in told[name]:
            np.testing.assert_allclose(each["logprobs"], each["trainer"], atol=CLOSE)
    # The logprobs that agree are not those of a model that no step has changed.
    (greedy,), (again,), (stopped,) = told["greedy"], told["greedy again"], told["stopped"]
    assert again["tokens"] == greedy["tokens"]
    np.testing.assert_allclose(again["logprobs"], greedy["logprobs"], atol=CLOSE)
    assert (stopped["tokens"], stopped["stop"]) == (greedy["tokens"][:1], "stop")
    for name in ("base", "first", "narrow", "second", "first again"):
        assert [(len(each["tokens"]), each["stop"]) for each in told[name]] == [
            (TOKENS_MAX, "length")
        ] * COUNT
        assert len({tuple(each["tokens"]) for each in told[name]}) == COUNT


def check_engine(folder: Path, engine: str, python: Path, arguments: str) -> dict[str, Any]:
    """A worker with this engine draws the samples of the client and of a recipe. Returns what the client was told."""
    model = server_model(folder / "model")
    hub = make_shadow(folder / "hub", model)
    with tinker_run(folder / "served", model, workers=0) as run:
        start_worker(
            run.programs,
            engine,
            run.folder,
            run.url,
            *(f"--base-model={model}", "--slots=32", f"--engine={engine}"),
            *(f"--engine-python={python}", f"--engine-args={arguments}"),
        )
        told = draw(run, folder, run.key())
        check_drawn(told)
        found = run_recipe("math_rl.train", RECIPE, run.url, run.key(), hub, CLIENT_S)
        log = (run.folder / "logs" / f"{engine}.log").read_text()
    steps = [row for row in found.metrics if "env/all/reward/total" in row]
    assert len(steps) == 2
    differences = [abs(row["optim/kl_sample_train_v1"]) for row in steps]
    assert max(differences) < CLOSE, differences
    # The server was started once, though the ranks of the client and of the recipe differ.
    _, *pauses = re.findall(r"serving version=.* pause_s=(\S+)", log)
    assert set(pauses) == {"0.000"}, pauses
    return told
