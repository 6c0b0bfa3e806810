"""Measures what evaluations cost the learner, in real runs: the bubble with and without them, by turns.

    python -m echo2d_lab.research.eval_bubble [--rounds 3] [--steps 22]

Coordinator, three workers with the torch engine and the learner are processes of this machine; S = 2,
kappa = 1, the demo's tiny model. A step takes at least STEP_S, as with a larger model, and each version
answers 200 held-out questions. The bubble is the learner's waiting time over its total time, without the
first steps.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from echo2d.demo.processes import Programs, start_worker, wait_for
from echo2d.demo.run import CACHE, CONFIG, DEMO_LEARNER
from echo2d.demo.tiny_model import TinyRecipe, make_tiny_model
from echo2d.recipes.recipe_file import changed

WORKERS, SLOTS = 3, 32
STEP_S = 5.0
ROWS = 200
# Steps that do not count, because a long run has hardly any wait for the first batch.
WARM_STEPS = 2
START_S, RUN_S_MAX = 120.0, 1800.0

POLICY = ("policy.trajectories_per_step=64",)
EVAL = f"""
[[eval]]
every = 1
rows = {ROWS}
"""
PACE = (f"learner.step_floor_s={STEP_S}", "learner.checkpoint_every=250")
Rows = Sequence[Mapping[str, Any]]


def played(run: Path, model: Path, steps: int, *, evaluates: bool) -> Rows:
    """The learner's metrics of one run."""
    (run / "snapshots").mkdir(parents=True)
    config = run / "run.toml"
    facts = {
        "run": run,
        "model": model,
        "seed": 0,
        "staleness": 2,
        "kappa": 1,
        "delta": "true",
        "task": "sort_digits",
    }
    text = changed(CONFIG.format(**facts), POLICY) + (EVAL if evaluates else "")
    config.write_text(text)
    with Programs(run / "logs") as programs:
        programs.start("coordinator", "-m", "echo2d", "coordinate", "--config", str(config))
        announced = wait_for(run / "coordinator" / "coordinator.json", programs, START_S)
        url = str(json.loads(announced)["url"])
        learner_table = DEMO_LEARNER.format(**facts, steps=steps)
        config.write_text(text + changed(learner_table, PACE))
        for number in range(WORKERS):
            limits = (f"--slots={SLOTS}", "--threads=1")
            start_worker(programs, f"worker-{number}", run, url, *limits)
        learner = programs.start("learner", "-m", "echo2d", "learn", "--config", str(config))
        learner.wait(RUN_S_MAX)
        programs.check()
    lines = (run / "learner" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def bubble(rows: Rows) -> float:
    counted = [row for row in rows if "loss" in row and row["step"] > WARM_STEPS]
    waited_s = sum(row["wait_s"] for row in counted)
    return float(waited_s / (waited_s + sum(row["t_train_s"] for row in counted)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=22)
    chosen = parser.parse_args()
    model = make_tiny_model(CACHE, TinyRecipe(rng_seed=0))
    differences = []
    for number in range(chosen.rounds):
        with tempfile.TemporaryDirectory() as folder:
            without = played(Path(folder) / "a", model, chosen.steps, evaluates=False)
            rows = played(Path(folder) / "b", model, chosen.steps, evaluates=True)
        scores = [each for row in rows if "eval" in row for each in row["eval"].values()]
        whole = sum(each["rows"] == each["of"] == ROWS for each in scores)
        differences.append(bubble(rows) - bubble(without))
        print(
            f"round {number + 1}: bubble {bubble(without):.3f} without, {bubble(rows):.3f} with; "
            f"{len(scores)} evaluations, {whole} whole",
            flush=True,
        )
    low, high = min(differences), max(differences)
    print(
        f"points of bubble: {100 * median(differences):+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
