"""A run of an example on one machine: coordinator, two workers and learner as programs of their own.

    run directory with run.toml --> echo2d coordinate, two times echo2d join, echo2d learn

Ctrl-C lets the learner save its step, and the same command goes on from there; after a kill it goes on
from the last checkpoint.
"""

import argparse
import json
import signal
import socket
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from echo2d.client import Coordinator
from echo2d.demo.live_view import LiveView
from echo2d.demo.processes import Program, Programs, start_worker, wait_for
from echo2d.demo.results import read_rows as metrics_rows
from echo2d.errors import Fault

WORKERS = 2
SLOTS = 48
START_S = 120.0
STOP_S = 180.0  # for the learner to finish its step and save it
POLL_S = 0.5
CACHE = Path.home() / ".cache" / "echo2d"
Rows = list[dict[str, Any]]


def run_target(target: str, run: Path, work: Callable[[], None]) -> None:
    """Do the work of `make target`. SystemExit: it was stopped, or failed by a known fault."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        work()
    except KeyboardInterrupt:
        raise SystemExit(f"stopped; `make {target}` goes on with {run}") from None
    except Fault as fault:
        raise SystemExit(f"make {target}: {fault}") from None


def require_same(target: str, chosen: argparse.Namespace, there: Mapping[str, object]) -> None:
    """SystemExit: an option that was given says otherwise than the config of the run that is `there`."""
    for name, value in there.items():
        asked = getattr(chosen, name)
        if asked is not None and asked != value:
            raise SystemExit(
                f"make {target}: {chosen.run_dir} has --{name} {value}, not {asked}; choose another "
                "--run-dir for another run"
            )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def read_rows(run: Path) -> tuple[Rows, Rows]:
    """The learner's rows of train steps, and those of evaluations."""
    rows = metrics_rows(run / "learner" / "metrics.jsonl")
    return [row for row in rows if "loss" in row], [row for row in rows if "eval" in row]


def train(run: Path, news: Callable[[], Sequence[object]] = tuple) -> None:
    """Run the programs of `run` and show what they do, until the learner has made all steps.

    news: all that is worth a line so far, oldest first.
    """
    config = run / "run.toml"
    settings = tomllib.loads(config.read_text())
    view = LiveView(settings["learner"]["steps"])
    view.say(f"run directory {run}; `echo2d status --run-dir {run}/coordinator --watch` shows more")
    with Programs(run / "logs", stop_s=STOP_S) as programs:
        programs.start("coordinator", "-m", "echo2d", "coordinate", "--config", str(config))
        announced = wait_for(run / "coordinator" / "coordinator.json", programs, START_S)
        url = json.loads(announced)["url"]
        for number in range(1, WORKERS + 1):
            limits = (f"--slots={SLOTS}", "--threads=1")
            start_worker(programs, f"worker-{number}", run, url, *limits)
        began = any((run / "learner" / "checkpoints").glob("*"))
        resume = ["--resume"] if began else []
        learner = programs.start(
            "learner", "-m", "echo2d", "learn", "--config", str(config), *resume
        )
        _watch(run, url, programs, learner, view, news)


def _watch(
    run: Path,
    url: str,
    programs: Programs,
    learner: Program,
    view: LiveView,
    news: Callable[[], Sequence[object]],
) -> None:
    shown = 0
    token = run / "coordinator" / "tokens" / "viewer.token"
    with Coordinator(url, token_file=token) as coordinator, view:
        while learner.returncode is None:
            time.sleep(POLL_S)
            programs.check()
            rows, _ = read_rows(run)
            view.show(coordinator.status(), rows, now=time.monotonic())
            found = news()
            for line in found[shown:]:
                view.say(str(line))
            shown = len(found)
        programs.check()
