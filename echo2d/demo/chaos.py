"""Kills processes of a demo with `kill -9` at steps that are drawn from the demo's seed, and measures how long each
recovery takes.

This module restarts the programs of the demo, as a supervisor would do. Seed and task processes belong to the
coordinator, which restarts them itself. Not here: what the run must still achieve (`demo/results.py`).
"""

import contextlib
import os
import random
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from echo2d.demo.processes import Programs, children_of
from echo2d.demo.results import Kill, read_rows
from echo2d.runtime.seed.supervisor import SEED_MODULE

VictimKind = Literal["learner", "coordinator", "worker", "seed", "task process"]
VICTIM_KINDS: tuple[VictimKind, ...] = get_args(VictimKind)
# The demo starts processes of these kinds. The coordinator starts those of the other kinds.
PROGRAM_KINDS = ("learner", "coordinator", "worker")
RECOVERED: Mapping[str, str] = {
    "learner": "has trained a step again",
    "coordinator": "has committed a step again",
    "worker": "serves a version again",
    "seed": "is connected again",
    "task process": "runs again",
}
STEPS_MIN = 8  # With fewer steps there is no room for a kill of each kind.
# All kills happen in this first share of the steps, because a later recovery might not end in time.
LAST_SHARE = 0.85
PAUSE_S_MAX = 1.0  # A supervisor waits at most this long before it restarts a program.
TASK_MODULE = "echo2d.tasks.pool_child"


@dataclass(frozen=True, slots=True)
class PlannedKill:
    """A kill that is due once this step is trained.

    name: the name of the program, or of the coordinator's child process. pause_s: seconds until a program is restarted.
    """

    step: int
    kind: VictimKind
    name: str
    pause_s: float


def plan_kills(steps: int, workers: int, rng_seed: int) -> list[PlannedKill]:
    """Plan kills over the run in random order. Workers are killed again and again, every other kind at least once."""
    rng = random.Random(rng_seed)
    kinds = list(VICTIM_KINDS)
    # A worker is killed every 16 steps, and a task process every 40.
    kinds += ["worker"] * (steps // 16 - 1)
    kinds += ["task process"] * (steps // 40 - 1)
    rng.shuffle(kinds)
    width = (LAST_SHARE * steps - 1) / len(kinds)
    return [
        PlannedKill(
            step=1 + int((number + rng.random()) * width),
            kind=kind,
            name=f"worker-{rng.randint(1, workers)}" if kind == "worker" else kind,
            pause_s=rng.uniform(0.0, PAUSE_S_MAX),
        )
        for number, kind in enumerate(kinds)
    ]


def find_process(kind: VictimKind, name: str, programs: Programs) -> int | None:
    """The process id that a kill refers to; None if that process is not running."""
    if kind in PROGRAM_KINDS:
        return programs[name].pid if programs[name].returncode is None else None
    module = SEED_MODULE if kind == "seed" else TASK_MODULE
    for pid in children_of(programs["coordinator"].pid):
        with contextlib.suppress(OSError):
            if module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                # A task process is the child of its guard.
                return pid if kind == "seed" else next(iter(children_of(pid)), None)
    return None


def kill_process(kind: VictimKind, name: str, programs: Programs) -> int | None:
    """Kill the process now and return its id; None if it is not running."""
    pid = find_process(kind, name, programs)
    if pid is not None and kind in PROGRAM_KINDS:
        programs[name].kill()
    elif pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return pid


def start_again(kind: VictimKind, name: str, programs: Programs) -> None:
    """Restart a program of the demo, as a supervisor does. The coordinator restarts its seed and
    task processes.
    """
    if kind in PROGRAM_KINDS:
        programs[name].start(*(["--resume"] if kind == "learner" else []))


@dataclass(slots=True)
class _Open:
    """A kill that was carried out. mark: (epoch, step) of the newest train step at the time of the kill."""

    planned: PlannedKill
    pid: int
    killed_at: float
    step: int
    mark: tuple[int, int]
    seen_down: bool = False
    recovery_s: float | None = None


class Chaos:
    """Carries out planned kills, driven by calls of `look`. metrics: path of the learner's rows."""

    def __init__(
        self,
        planned: Sequence[PlannedKill],
        programs: Programs,
        metrics: Path,
        say: Callable[[str], None],
    ) -> None:
        self._planned = deque(planned)
        self._programs = programs
        self._metrics = metrics
        self._say = say
        self._began = time.monotonic()
        self._kills: list[_Open] = []
        # The last status of each coordinator that was killed.
        self.lives: list[Mapping[str, Any]] = []

    @property
    def quiet(self) -> bool:
        """Whether every killed process has recovered."""
        return all(kill.recovery_s is not None for kill in self._kills)

    def kills(self) -> tuple[Kill, ...]:
        """All planned kills in order. A kill that was never carried out counts as not recovered."""
        now_s = time.monotonic() - self._began
        done = (
            Kill(
                each.planned.kind,
                each.planned.name,
                each.step,
                each.killed_at - self._began,
                each.recovery_s,
            )
            for each in self._kills
        )
        return (
            *done,
            *(Kill(each.kind, each.name, each.step, now_s, None) for each in self._planned),
        )

    def look(self, facts: Mapping[str, Any]) -> None:
        """Record what has recovered and kill what is due. facts: the run's present status."""
        for kill in self._kills:
            if kill.recovery_s is None and self._moves_again(kill, facts):
                kill.recovery_s = time.monotonic() - kill.killed_at
                done = RECOVERED[kill.planned.kind]
                self._tell(
                    f"{kill.planned.name} {done}, {kill.recovery_s:.1f} s after it was killed"
                )
        step = self._reached()[0]
        while (
            self._planned and step >= self._planned[0].step and self._kill(self._planned[0], facts)
        ):
            self._planned.popleft()

    def _kill(self, planned: PlannedKill, facts: Mapping[str, Any]) -> bool:
        killed_at = time.monotonic()
        pid = kill_process(planned.kind, planned.name, self._programs)
        if pid is None:
            return False
        if planned.kind == "coordinator":
            self.lives.append(facts)
        # The step is read after the kill, because a dead learner writes no more rows.
        step, mark = self._reached()
        self._kills.append(_Open(planned, pid, killed_at, step, mark))
        self._tell(f"{planned.name} is killed at step {step}")
        time.sleep(planned.pause_s)
        start_again(planned.kind, planned.name, self._programs)
        return True

    def _tell(self, text: str) -> None:
        self._say(f"{time.monotonic() - self._began:5.1f} s  {text}")

    def _reached(self) -> tuple[int, tuple[int, int]]:
        """The highest train step, and (epoch, step) of the newest row. The newest row may repeat an earlier step."""
        rows = read_rows(self._metrics)
        return (
            (max(row["step"] for row in rows), (rows[-1]["epoch"], rows[-1]["step"]))
            if rows
            else (0, (0, 0))
        )

    def _moves_again(self, kill: _Open, facts: Mapping[str, Any]) -> bool:
        kind, name = kill.planned.kind, kill.planned.name
        if kind in ("learner", "coordinator"):
            return self._reached()[1] > kill.mark
        if kind == "worker":
            serves = any(
                each["name"] == name and each["alive"] and each["serving"]
                for each in facts["workers"]
            )
            kill.seen_down = kill.seen_down or not serves
            return serves and kill.seen_down
        replaced = find_process(kind, name, self._programs) not in (None, kill.pid)
        return replaced and (kind == "task process" or facts["seed_alive"])
