"""LoRA as processes: a coordinator, a worker with an SGLang server, one with a vLLM server, and a learner."""

import json
from pathlib import Path

import pytest

from echo2d.client import Coordinator
from echo2d.demo.processes import Programs, wait_for
from echo2d.demo.run import CACHE, CONFIG, DEMO_LEARNER
from echo2d.demo.tiny_model import make_tiny_model
from echo2d.recipes.recipe_file import changed
from tests.support.control_link import worker_token
from tests.support.paths import REPO
from tests.support.server_loops import until_done
from tests.support.sglang_servers import FLAGS as SGLANG_FLAGS
from tests.support.sglang_servers import PYTHON as SGLANG
from tests.support.vllm_servers import PYTHON as VLLM

STEPS, TRAJECTORIES, STALENESS = 10, 64, 2
CHANGES = [
    f"policy.trajectories_per_step={TRAJECTORIES}",
    "learner.lora_rank=4",
    "learner.lora_alpha=8.0",
    "learner.lr=3e-3",
    # vLLM starts once the first version is there, and takes half a minute for it.
    "learner.step_floor_s=7.0",
]


@pytest.mark.skipif(
    not (REPO / ".cache" / "sglang" / "ready").exists(),
    reason="no SGLang here: `make nightly-sglang` installs it",
)
def test_a_sglang_and_a_vllm_worker_serve_the_adapters_of_a_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    model = make_tiny_model(CACHE)
    (run / "snapshots").mkdir(parents=True)
    config = run / "run.toml"
    settings = {
        "run": run, "model": model, "seed": 0, "staleness": STALENESS, "kappa": 1, "delta": "true",
        "task": "sort_digits",
    }  # fmt: skip
    text = CONFIG.format(**settings) + DEMO_LEARNER.format(**settings, steps=STEPS)
    config.write_text(changed(text, CHANGES))
    with Programs(run / "logs") as programs:
        programs.start("coordinator", "-m", "echo2d", "coordinate", "--config", str(config))
        url = json.loads(wait_for(run / "coordinator" / "coordinator.json", programs, 60.0))["url"]
        start_worker(
            programs,
            run,
            url,
            "sglang",
            SGLANG,
            model,
            *SGLANG_FLAGS,
            "--lora-backend torch_native",
        )
        start_worker(
            programs, run, url, "vllm", VLLM, model, "--dtype float32", "--max-num-seqs 64"
        )
        learner = programs.start("learner", "-m", "echo2d", "learn", "--config", str(config))
        with Coordinator(
            url, token_file=run / "coordinator" / "tokens" / "viewer.token"
        ) as coordinator:
            until_done(programs, coordinator, lambda _: learner.returncode is not None)
            facts = until_done(programs, coordinator, lambda facts: all_serve(facts))
    rows = [
        json.loads(line) for line in (run / "learner" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert facts["trajectories"]["trained"] == STEPS * TRAJECTORIES
    assert all(worker["accepted"] > 0 for worker in facts["workers"]), "both made rollouts"
    assert [worker["refit_pause_s"] for worker in facts["workers"]] == [0.0, 0.0]
    # The engines compute what the learner computes: adapters are not mixed up.
    assert max(row["kl"] for row in rows) < 0.1
    whole = (model / "model.safetensors").stat().st_size
    received = [worker["received_bytes"] for worker in facts["workers"]]
    assert max(received) < whole / 2, "no version of the run had the base's weights"


def start_worker(
    programs: Programs, run: Path, url: str, engine: str, python: Path, model: Path, *flags: str
) -> None:
    token = run / f"{engine}.token"
    worker_token(run / "coordinator", url, engine, out=token)
    options = {
        "token-file": token, "state-dir": run / engine, "name": engine, "slots": 32, "base-model": model,
        "engine": engine, "engine-python": python, "engine-args": " ".join(flags),
    }  # fmt: skip
    programs.start(
        engine,
        "-m",
        "echo2d",
        "join",
        url,
        *(f"--{flag}={value}" for flag, value in options.items()),
    )


def all_serve(facts: dict[str, object]) -> bool:
    workers = facts["workers"]
    assert isinstance(workers, list)
    served = [worker["serving"] for worker in workers]
    return len(served) == 2 and all(each and each["version"] == STEPS for each in served)
