"""The whole loop as processes: coordinator, two workers with a real SGLang server each, learner; steps of GRPO."""

import json
from pathlib import Path
from typing import Any

import pytest

from echo2d.client import Coordinator
from echo2d.demo.processes import Programs, wait_for
from echo2d.demo.run import CACHE, CONFIG, DEMO_LEARNER
from echo2d.demo.tiny_model import make_tiny_model
from echo2d.recipes.recipe_file import changed
from tests.support.control_link import worker_token
from tests.support.model_shapes import FOR_SGLANG, saved
from tests.support.server_loops import until_done
from tests.support.sglang_servers import FLAGS, PYTHON

STEPS, WORKERS = 5, 2


@pytest.mark.parametrize("mixture", [False, True], ids=["dense", "experts replayed"])
def test_two_workers_and_a_learner_train_some_steps_of_grpo(tmp_path: Path, mixture: bool) -> None:
    run = tmp_path / "run"
    model = make_tiny_model(CACHE)
    # No group is trained without its last answer, so that the answers can be counted.
    changes = ["policy.trajectories_per_step=64", "policy.group_patience=0.0"]
    if mixture:
        model = saved(tmp_path / "model", "qwen3 moe", model, **FOR_SGLANG)
        changes.append('policy.columns=["experts"]')
    (run / "snapshots").mkdir(parents=True)
    config = run / "run.toml"
    settings = {"run": run, "model": model, "seed": 0, "staleness": 2, "kappa": 1, "delta": "true"}
    settings["task"] = "sort_digits"
    text = changed(CONFIG.format(**settings), changes)
    config.write_text(text)
    with Programs(run / "logs") as programs:
        programs.start("coordinator", "-m", "echo2d", "coordinate", "--config", str(config))
        url = json.loads(wait_for(run / "coordinator" / "coordinator.json", programs, 60.0))["url"]
        config.write_text(text + DEMO_LEARNER.format(**settings, steps=STEPS))
        for number in range(1, WORKERS + 1):
            start_worker(programs, run, url, f"worker-{number}", mixture=mixture)
        learner = programs.start("learner", "-m", "echo2d", "learn", "--config", str(config))
        with Coordinator(
            url, token_file=run / "coordinator" / "tokens" / "viewer.token"
        ) as coordinator:
            facts = until_done(programs, coordinator, lambda _: learner.returncode is not None)
            facts = until_done(programs, coordinator, all_serve)
    rows = [
        json.loads(line) for line in (run / "learner" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert facts["trajectories"]["trained"] == STEPS * 64
    if mixture:
        assert [row["router"]["replayed"] for row in rows if row.get("router")] == [1.0] * STEPS
    assert all(worker["accepted"] > 0 for worker in facts["workers"]), "both made rollouts"
    assert not list((run / "worker-1" / "engines").glob("*/keys.yaml"))


def start_worker(programs: Programs, run: Path, url: str, name: str, *, mixture: bool) -> None:
    arguments = [*FLAGS, *(["--enable-return-routed-experts"] if mixture else [])]
    token = run / f"{name}.token"
    worker_token(run / "coordinator", url, name, out=token)
    flags = {
        "token-file": token, "state-dir": run / name, "name": name, "slots": 32,
        "engine": "sglang", "engine-python": PYTHON, "engine-args": " ".join(arguments),
    }  # fmt: skip
    programs.start(
        name, "-m", "echo2d", "join", url, *(f"--{flag}={value}" for flag, value in flags.items())
    )


def all_serve(facts: dict[str, Any]) -> bool:
    served = [worker["serving"] for worker in facts["workers"]]
    return len(served) == WORKERS and all(
        each is not None and each["version"] == STEPS for each in served
    )
