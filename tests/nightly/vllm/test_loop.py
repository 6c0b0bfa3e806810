"""Whole runs as processes: a coordinator, workers with an SGLang and a vLLM server, and a learner."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

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
# vLLM starts once the first version is there, and takes half a minute for it.
SLOW = "learner.step_floor_s=7.0"
ADAPTERS = ("learner.lora_rank=4", "learner.lora_alpha=8.0", "learner.lr=3e-3")
# vLLM does not draw from the coordinator's seeds.
AUDIT = (
    "audit.enabled=true", 'audit.trusted=["torch"]', 'audit.seeds="none"', "audit.share=1.0",
    "audit.newcomer=5",
)  # fmt: skip
AUDITED_MIN = 20  # of each worker's answers

pytestmark = pytest.mark.skipif(
    not (REPO / ".cache" / "sglang" / "ready").exists(),
    reason="no SGLang here: `make nightly-sglang` installs it",
)


@dataclass
class Loop:
    """A run of the demo's model, and its programs."""

    run: Path
    programs: Programs
    url: str
    model: Path

    def join(self, engine: str, **options: object) -> None:
        token = self.run / f"{engine}.token"
        worker_token(self.run / "coordinator", self.url, engine, out=token)
        options = {
            "token-file": token, "state-dir": self.run / engine, "name": engine, "slots": 32, "base-model": self.model,
            "engine": engine, **options,
        }  # fmt: skip
        flags = (f"--{flag}={value}" for flag, value in options.items())
        self.programs.start(engine, "-m", "echo2d", "join", self.url, *flags)

    def join_servers(self, *flags: str) -> None:
        """One worker with SGLang, with these flags too, and one with vLLM."""
        sglang = " ".join((*SGLANG_FLAGS, *flags))
        self.join("sglang", **{"engine-python": SGLANG, "engine-args": sglang})
        vllm = "--dtype float32 --max-num-seqs 64"
        self.join("vllm", **{"engine-python": VLLM, "engine-args": vllm})

    def train(self, until: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Train all steps and wait; returns the status."""
        config = str(self.run / "run.toml")
        learner = self.programs.start("learner", "-m", "echo2d", "learn", "--config", config)
        viewer = self.run / "coordinator" / "tokens" / "viewer.token"
        with Coordinator(self.url, token_file=viewer) as coordinator:
            until_done(self.programs, coordinator, lambda _: learner.returncode is not None)
            return until_done(self.programs, coordinator, until)

    def rows(self) -> list[dict[str, Any]]:
        lines = (self.run / "learner" / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


@contextmanager
def a_loop(tmp_path: Path, steps: int, *changes: str) -> Iterator[Loop]:
    run, model = tmp_path / "run", make_tiny_model(CACHE)
    (run / "snapshots").mkdir(parents=True)
    config = run / "run.toml"
    settings = {
        "run": run, "model": model, "seed": 0, "staleness": STALENESS, "kappa": 1, "delta": "true",
        "task": "sort_digits",
    }  # fmt: skip
    text = CONFIG.format(**settings) + DEMO_LEARNER.format(**settings, steps=steps)
    more = (f"policy.trajectories_per_step={TRAJECTORIES}", SLOW, *changes)
    config.write_text(changed(text, more))
    with Programs(run / "logs") as programs:
        programs.start("coordinator", "-m", "echo2d", "coordinate", "--config", str(config))
        told = json.loads(wait_for(run / "coordinator" / "coordinator.json", programs, 60.0))
        yield Loop(run, programs, told["url"], model)


def test_a_sglang_and_a_vllm_worker_serve_the_adapters_of_a_run(tmp_path: Path) -> None:
    steps = 6 * STEPS
    with a_loop(tmp_path, steps, *ADAPTERS, "learner.step_floor_s=3.5") as loop:
        loop.join_servers("--lora-backend", "torch_native")
        facts = loop.train(lambda facts: all_serve(facts, 2, steps))
    rows = loop.rows()
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    first, last = (
        fmean([row["reward_mean"] for row in part])
        for part in (rows[: steps // 4], rows[-steps // 4 :])
    )
    print(f"reward {first:.3f} in the first quarter of the steps, {last:.3f} in the last")  # noqa: T201
    # 960 answers have a mean reward that is certain to 0.016.
    assert last > first + 0.07
    assert facts["trajectories"]["trained"] == steps * TRAJECTORIES
    assert all(worker["accepted"] > 0 for worker in facts["workers"]), "both made rollouts"
    assert [worker["refit_pause_s"] for worker in facts["workers"]] == [0.0, 0.0]
    # The engines compute what the learner computes: adapters are not mixed up.
    assert max(row["kl"] for row in rows) < 0.1
    adapters = loop.run.glob("coordinator/versions/*/adapter_model.safetensors")
    adapter = max(each.stat().st_size for each in adapters)
    received = max(worker["received_bytes"] for worker in facts["workers"])
    # With the base in a single version it would be more than half: the whole model has 14 times the bytes.
    assert received / (steps + 1) < adapter / 2


def test_one_worker_of_each_engine_is_audited_and_none_is_convicted(tmp_path: Path) -> None:
    """The servers get each version in memory."""
    with a_loop(tmp_path, 2 * STEPS, *AUDIT) as loop:
        loop.join("torch", set="dtype=float32", threads=1)
        loop.join_servers()
        facts = loop.train(lambda facts: all_serve(facts, 3, 2 * STEPS))
        logs = {
            name: (loop.run / "logs" / f"{name}.log").read_text() for name in ("sglang", "vllm")
        }
    for worker in facts["workers"]:
        assert worker["audited"] >= AUDITED_MIN, worker
        assert (worker["flagged"], worker["standing"]) in {(0, "clear"), (0, "trusted")}
    assert max(row["kl"] for row in loop.rows()) < 0.1
    assert not any("loaded from disk" in log for log in logs.values())


def all_serve(facts: dict[str, Any], count: int, version: int = STEPS) -> bool:
    served = [worker["serving"] for worker in facts["workers"]]
    return len(served) == count and all(each and each["version"] == version for each in served)
