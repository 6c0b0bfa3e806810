"""Learners as processes: two at a time, one whose newest checkpoint is damaged, and one that publishes adapters."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.polling import START_S, poll
from tests.support.programs import Site

pytestmark = [pytest.mark.timeout(900)]


def checkpoint_each_step(site: Site) -> None:
    """And take a moment for it, so that the next learner comes while the first one is at work."""
    learner = "\n[learner]\ncheckpoint_every = 1\nstep_floor_s = 0.2"
    site.learner_table = site.learner_table.replace("\n[learner]", learner).replace(
        "checkpoint_every = 15\n", ""
    )


def rows(site: Site) -> list[dict[str, Any]]:
    path = site.directory / "learner" / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def checkpoints(site: Site) -> list[Path]:
    return sorted((site.directory / "learner" / "checkpoints").glob("step-*"))


def test_the_newer_of_two_learners_wins(site: Site) -> None:
    checkpoint_each_step(site)
    coordinator = site.coordinate()
    site.join("box", "--threads=1")
    older = site.learn(10_000)
    poll(lambda: len(rows(site)) >= 2)
    newer = site.learn(10_001, "--resume", "--take-over")
    assert older.wait(START_S) == 2
    # A checkpoint that is still being written may be logged after it.
    (said,) = [line for line in older.tail().splitlines() if line.startswith("learner: ")]
    assert said == "learner: a newer learner has the run (epoch 2 is in force); this one is over"
    assert "Traceback" not in older.log.read_text()
    poll(lambda: sum(row["epoch"] == 2 for row in rows(site)) >= 2)
    newer.terminate()
    assert newer.wait(START_S) == 0
    facts, told = site.status(), rows(site)
    steps = sorted({row["step"] for row in told})
    assert (facts["epoch"], facts["committed_step"]) == (2, steps[-1])
    assert steps == list(range(1, len(steps) + 1))
    assert told == sorted(
        told, key=lambda row: row["epoch"]
    )  # the older one trained nothing after the newer had begun
    assert [path.name.partition("-epoch")[2] for path in checkpoints(site)] == ["-2", "-2"]
    assert coordinator.returncode is None


def test_a_step_lost_with_a_damaged_checkpoint_is_trained_again_to_the_same_weights(
    site: Site,
) -> None:
    checkpoint_each_step(site)
    site.coordinate()
    site.join("box", "--threads=1")
    assert site.learn(4).wait(START_S) == 0
    os.truncate(checkpoints(site)[-1] / "__0_0.distcp", 1000)
    again = site.learn(5, "--resume")
    assert again.wait(START_S) == 0
    said = again.log.read_text()
    assert (
        f"cannot read the checkpoint {site.directory}/learner/checkpoints/step-00000004-epoch-1: "
        in said
    )
    assert "resume_step=3" in said
    told = [(row["step"], row["epoch"]) for row in rows(site)]
    assert told == [(1, 1), (2, 1), (3, 1), (4, 1), (4, 2), (5, 2)]
    for name in ("reward_mean", "loss", "grad_norm", "tokens"):
        assert rows(site)[3][name] == rows(site)[4][name]
    facts = site.status()
    assert (facts["epoch"], facts["committed_step"], facts["checkpoint_step"]) == (2, 5, 4)
    poll(lambda: _serving(site) == 5)
    they_are_not_for_another_run(site)


def _serving(site: Site) -> int | None:
    workers: Any = site.status()["workers"]
    serving = workers[0]["serving"]
    return None if serving is None else int(serving["version"])


def they_are_not_for_another_run(site: Site) -> None:
    """Checkpoints and a run directory that do not belong together are the operator's mistake."""
    site.programs.stop()
    site.run_dir.rename(site.directory / "old")
    site.coordinate("anew")
    lost = site.learn(6, "--resume")
    assert lost.wait(START_S) == 2
    last = lost.tail().splitlines()[-1]
    expected = rf"learner: learner\.out_dir: {site.directory}/learner has checkpoints of run \w+; this is run \w+"
    assert re.fullmatch(expected, last)


def test_a_run_publishes_lora_adapters(site: Site) -> None:
    site.learner_table += "lora_rank = 4\n"
    site.coordinate()
    site.join("box", "--threads=1", f"--base-model={site.facts['model']}")
    assert site.learn(2).wait(START_S) == 0
    (version,) = (site.run_dir / "versions").glob("2-*")
    assert {path.name for path in version.iterdir()} == {
        *("adapter_config.json", "adapter_model.safetensors", "base.json"),
    }

    def box() -> dict[str, Any]:
        workers: Any = site.status()["workers"]
        (worker,) = workers
        return dict(worker)

    poll(lambda: (box()["serving"] or {}).get("version") == 2)
    assert box()["memory_ok"] is True
