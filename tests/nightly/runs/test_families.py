"""Closed loops of models of several families: coordinator, a worker with the torch engine, and learner.

The weights are random, so nothing is learned; the tests check that every program reads and writes the family's files
alike.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from echo2d.demo.processes import Programs
from echo2d.demo.results import read_rows
from echo2d.demo.tiny_model import make_tiny_model
from echo2d.store.snapshots import build_manifest
from tests.support.model_shapes import saved
from tests.support.polling import START_S, poll
from tests.support.programs import Site

pytestmark = [pytest.mark.timeout(900)]

STEPS, PER_STEP = 3, 32
MIXTURES = ["qwen3 moe", "mixtral", "gpt-oss"]
FAMILIES = [*MIXTURES, "gemma3 with windows and a soft cap", "llama", "qwen3"]
TASK = '"tests.support.even_tokens_task:EvenTokens"'
# Engine and learner compute in float32 on the same bfloat16 weights while version 0 is the newest.
DISTANCE_MAX = 1e-4


def box(site: Site) -> dict[str, Any]:
    workers: Any = site.status()["workers"]
    (worker,) = workers
    return dict(worker)


def coordinated(directory: Path, family: str, programs: Programs) -> tuple[Site, Path]:
    """A site with a coordinator, and its model."""
    tokenizer = make_tiny_model(Path.home() / ".cache" / "echo2d")
    model = saved(directory / "model", family, tokenizer)
    site = Site(directory, model, programs)
    text = site.config.read_text().replace("options = { rng_seed = 0 }\n", "")
    site.config.write_text(text.replace('"sort_digits"', TASK))
    site.coordinate()
    return site, model


@pytest.mark.parametrize("family", FAMILIES)
def test_the_worker_serves_the_last_version_of_a_committed_run(tmp_path: Path, family: str) -> None:
    with Programs(tmp_path / "logs") as programs:
        site, model = coordinated(tmp_path, family, programs)
        site.join("box", "--threads=1")
        assert site.learn(STEPS).wait(START_S) == 0
        poll(lambda: (box(site)["serving"] or {}).get("version") == STEPS)
        facts, worker = site.status(), box(site)

    assert (facts["epoch"], facts["committed_step"]) == (1, STEPS)
    versions = [
        next((site.run_dir / "versions").glob(f"{version}-*")) for version in (STEPS - 1, STEPS)
    ]
    assert worker["serving"]["digest"] == build_manifest(versions[1]).digest.hex()
    assert worker["memory_ok"] is True, "the engine's memory has the digests of the files"
    rows = read_rows(site.directory / "learner" / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert len({row["batch"] for row in rows}) == STEPS
    assert all(0 < row["grad_norm"] < 1e6 for row in rows)
    assert all(("router" in row) == (family in MIXTURES) for row in rows)
    assert rows[0]["kl"] < DISTANCE_MAX
    names = load_file(model / "model.safetensors").keys()
    before, after = (load_file(version / "model.safetensors") for version in versions)
    assert before.keys() == after.keys() == names
    assert any(not torch.equal(before[name], after[name]) for name in names)


def test_the_worker_serves_adapters_beside_a_mixture_of_experts(tmp_path: Path) -> None:
    """It compares the base in its memory with the files before it serves an adapter."""
    with Programs(tmp_path / "logs") as programs:
        site, model = coordinated(tmp_path, "qwen3 moe", programs)
        site.learner_table += 'lora_rank = 2\nlora_targets = ["q_proj", "v_proj"]\n'
        site.join("box", "--threads=1", f"--base-model={model}")
        assert site.learn(STEPS).wait(START_S) == 0
        poll(lambda: (box(site)["serving"] or {}).get("version") == STEPS)
        assert box(site)["memory_ok"] is True
    rows = read_rows(site.directory / "learner" / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert rows[0]["kl"] < DISTANCE_MAX
