"""Train SmolLM2-135M-Instruct to use a calculator, by the whole system on two CPU cores: `make calculator`.

    wheel --> model directory, with a chat template that has tool calls
    question --> tool call --> its result --> answer: the environment "calculator", in two turns

The config below is for a small model on a CPU. When the run is done, versions of it answer held-out
questions. Ctrl-C and the same command again go on, as with `make math`.
"""

import argparse
import shutil
import tomllib
from functools import partial
from pathlib import Path

from examples.calculator.figure import draw, print_result
from examples.calculator.held_out import read_scores, score_versions
from examples.one_machine import CACHE, free_port, require_same, run_target, train
from examples.smollm2 import model_directory

STEPS = 18
EVERY = 6
GROUP = 12
TRAJECTORIES = 72
QUESTIONS = 80
TEMPLATE = Path(__file__).with_name("tool_template.jinja")
CONFIG = """\
[run]
base_model = "model"
keep_every = {every}

[coordinator]
port = {port}

[link]
port = 0

[policy]
staleness_max = 3
trajectories_per_step = {trajectories}
group_size = {group}

[sampling]
max_new_tokens = 44 # of each turn; a call has at most 33

[task]
kind = "examples.environments.calculator:Calculator"
options = {{ level = 1, demonstrations = 1, turns = 2, rng_seed = {seed} }}
processes = 1

[learner]
steps = {steps}
lr = 4e-5
warmup_steps = 4
micro_batch_tokens = 1024 # a group is one pass; larger ones only take memory
threads = 1
checkpoint_every = 5
rng_seed = {seed}
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="make calculator", description="Train a language model to use a tool."
    )
    parser.add_argument(
        "--run-dir", type=Path, default=Path("runs/calculator"), help="goes on if it exists"
    )
    parser.add_argument("--steps", type=int, help=f"train steps ({STEPS})")
    parser.add_argument("--seed", type=int, help="of the questions (0)")
    parser.add_argument(
        "--every", type=int, help=f"steps from one version that is scored to the next ({EVERY})"
    )
    parser.add_argument("--trajectories", type=int, help=f"of a train step ({TRAJECTORIES})")
    parser.add_argument(
        "--questions", type=int, default=QUESTIONS, help=f"held out, of each score ({QUESTIONS})"
    )
    chosen = parser.parse_args()
    run_target("calculator", chosen.run_dir, partial(_run, chosen))


def _run(chosen: argparse.Namespace) -> None:
    run: Path = chosen.run_dir.absolute()
    config = run / "run.toml"
    if not config.exists():
        _prepare(chosen, run)
    settings = tomllib.loads(config.read_text())
    there = {
        "steps": settings["learner"]["steps"],
        "seed": settings["learner"]["rng_seed"],
        "every": settings["run"]["keep_every"],
        "trajectories": settings["policy"]["trajectories_per_step"],
    }
    require_same("calculator", chosen, there)
    train(run)
    score_versions(run, questions=chosen.questions)
    scores = read_scores(run)
    draw(scores, run / "accuracy.png")
    print_result(scores)
    print(f"figure: {run / 'accuracy.png'}")
    print(f"trained model: echo2d keep export --run-dir {run / 'coordinator'} --last DIR")


def _prepare(chosen: argparse.Namespace, run: Path) -> None:
    """Write model directory and config. The folder may have those of a start that was cut off."""
    base, model = model_directory(CACHE), run / "model"
    run.mkdir(parents=True, exist_ok=True)
    shutil.copytree(base, model, dirs_exist_ok=True)
    shutil.copy(TEMPLATE, model / "chat_template.jinja")
    (run / "snapshots").mkdir(exist_ok=True)
    text = CONFIG.format(
        run=run,
        port=free_port(),
        seed=chosen.seed or 0,
        steps=chosen.steps or STEPS,
        every=chosen.every or EVERY,
        trajectories=chosen.trajectories or TRAJECTORIES,
        group=GROUP,
    )
    (run / "run.toml").write_text(text)


if __name__ == "__main__":
    main()
