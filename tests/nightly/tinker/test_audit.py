"""Samples of clients are audited: those of an honest worker are used, and a liar's are drawn again."""

import json
from pathlib import Path
from typing import Any

from echo2d.client import Coordinator
from tests.support.control_link import worker_token
from tests.support.tinker_engines import check_drawn, draw
from tests.support.tinker_recipes import make_shadow, recipe_model, run_recipe
from tests.support.tinker_run import TinkerRun, tinker_run

RECIPE_S = 300.0
CLOSE = 1e-4
AUDIT = """
[audit]
enabled = true
trusted = ["box-0"]
share = 1.0
"""
LIAR = ("echo2d_lab.bench.liars.worker", "made_up", "1.0")
# 64 samples each: limits are learnt from 200 of the trusted worker, and then others draw, too.
STEPS = 6
RECIPE = (
    "renderer_name=role_colon", "env=arithmetic", "group_size=8", "groups_per_batch=8", "max_tokens=8",
)  # fmt: skip


def test_a_liars_samples_do_not_reach_the_client(tmp_path: Path) -> None:
    model = recipe_model(tmp_path / "model")
    hub = make_shadow(tmp_path / "hub", model)
    with tinker_run(tmp_path / "served", model, tables=AUDIT) as run:
        join(run, model, "honest", "echo2d")
        # A worker that is convicted ends, and no key can be had then.
        keys = run.keys(2)
        join(run, model, "liar", *LIAR, str(model))
        arguments = (*RECIPE, f"max_steps={STEPS}")
        found = run_recipe("math_rl.train", arguments, run.url, keys[0], hub, RECIPE_S)
        # Greedy and narrow draws, and weights that are served again, are audited as well.
        check_drawn(draw(run, tmp_path, keys[1]))
        with Coordinator(
            run.url, token_file=run.folder / "coordinator" / "tokens" / "viewer.token"
        ) as coordinator:
            facts = coordinator.status()
    # A made-up logprob is some nats off.
    differences = [abs(row.get("optim/kl_sample_train_v1", 0.0)) for row in found.metrics]
    assert max(differences) < CLOSE, differences
    workers: dict[str, Any] = {each["name"]: each for each in facts["workers"]}
    assert {name: each["standing"] for name, each in workers.items()} == {
        "box-0": "trusted",
        "honest": "clear",
        "liar": "convicted",
    }
    assert [workers[name]["flagged"] for name in ("box-0", "honest")] == [0, 0]
    assert facts["gateway"]["ended"]["failed"] > 0, "what the liar drew was drawn again"
    assert facts["audit"]["skipped"] == 0, json.dumps(facts)


def join(run: TinkerRun, model: Path, name: str, *module: str) -> None:
    token = run.folder / f"{name}.token"
    worker_token(run.folder / "coordinator", run.url, name, out=token)
    flags = {
        "token-file": token, "state-dir": run.folder / name, "name": name, "base-model": model, "slots": 16,
        "threads": 1,
    }  # fmt: skip
    words = (f"--{flag}={value}" for flag, value in flags.items())
    run.programs.start(name, "-m", *module, "join", run.url, *words)
