"""Train a tiny model to play poker, by the whole system on a CPU: `make poker`.

    tiny model --> coordinator, two workers, learner --> the last version
    hands against always-call, and as many against always-raise: tasks of one run
    the last version against each of them, 10,000 hands with other seeds --> matches.json

The model is not told against whom it plays: it sees its cards, the board and what was done. Ctrl-C and
the same command again go on, as with `make math`.
"""

import argparse
import tomllib
from functools import partial
from pathlib import Path

from examples.one_machine import free_port, require_same, run_target, train
from examples.poker.matches import play_matches, print_matches
from examples.poker.tiny_model import make_poker_model

STEPS = 400
TRAJECTORIES = 256
HANDS = 10_000
STACK = 20
CONFIG = """\
[run]
base_model = "model"

[coordinator]
port = {port}

[link]
port = 0

[policy]
staleness_max = 2
trajectories_per_step = {trajectories}
group_size = 16
filter_zero_variance = false # where a whole group folds, the entropy still has a say

[sampling]
max_new_tokens = 1 # an action is one token
{tasks}
[learner]
steps = {steps}
objective = "dr_grpo" # advantages in big blinds, so that large pots count more than small ones
loss_tokens = 2 # answers of a hand, about
entropy_coef = 0.8 # in big blinds; with less it is all in with any cards before it has learned what they are
grad_clip = 10.0
lr = 2e-3
lr_schedule = "cosine"
warmup_steps = 5
threads = 1
checkpoint_every = 50
rng_seed = {seed}
"""
TASK = """
[[task]]
kind = "examples.environments.poker.environment:Poker"
name = "{opponent}"
options = {{ opponent = "{opponent}", stack = {stack}, illegal_penalty = 10.0, alphabet = "tokens", rng_seed = {seed} }}
processes = 1
"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="make poker", description="Train a model to play poker.")
    parser.add_argument(
        "--run-dir", type=Path, default=Path("runs/poker"), help="goes on if it exists"
    )
    parser.add_argument("--steps", type=int, help=f"train steps ({STEPS})")
    parser.add_argument("--seed", type=int, help="of the model and of the hands (0)")
    parser.add_argument("--trajectories", type=int, help=f"hands of a train step ({TRAJECTORIES})")
    parser.add_argument("--stack", type=int, help=f"of each player, in big blinds ({STACK})")
    parser.add_argument(
        "--hands", type=int, default=HANDS, help=f"of each match at the end ({HANDS:,})"
    )
    chosen = parser.parse_args()
    run_target("poker", chosen.run_dir, partial(_run, chosen))


def _run(chosen: argparse.Namespace) -> None:
    run: Path = chosen.run_dir.absolute()
    config = run / "run.toml"
    if not config.exists():
        _prepare(chosen, run)
    settings = tomllib.loads(config.read_text())
    there = {
        "steps": settings["learner"]["steps"],
        "seed": settings["learner"]["rng_seed"],
        "trajectories": settings["policy"]["trajectories_per_step"],
        "stack": settings["task"][0]["options"]["stack"],
    }
    require_same("poker", chosen, there)
    train(run)
    print_matches(play_matches(run, hands=chosen.hands))
    print(f"as JSON: {run / 'matches.json'}")
    print(f"trained model: echo2d keep export --run-dir {run / 'coordinator'} --last DIR")


def _prepare(chosen: argparse.Namespace, run: Path) -> None:
    """Write model directory and config. The folder may have those of a start that was cut off."""
    seed = chosen.seed or 0
    (run / "model").mkdir(parents=True, exist_ok=True)
    (run / "snapshots").mkdir(exist_ok=True)
    make_poker_model(run / "model", rng_seed=seed)
    stack = STACK if chosen.stack is None else chosen.stack
    tasks = (TASK.format(opponent=name, stack=stack, seed=seed) for name in ("call", "raise"))
    text = CONFIG.format(
        run=run,
        port=free_port(),
        seed=seed,
        steps=chosen.steps or STEPS,
        trajectories=chosen.trajectories or TRAJECTORIES,
        tasks="".join(tasks),
    )
    (run / "run.toml").write_text(text)


if __name__ == "__main__":
    main()
