"""Counts what a process holds: memory, threads and descriptors by the kernel, and objects of Python.

`CountQuestion` has both ends: the soak asks, and a thread in the program answers with a line in a file. So
echo2d itself needs no port, signal or route for it.
"""

import asyncio
import gc
import json
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from echo2d.errors import Fault
from echo2d_lab.bench.coordinator.load_meter import rss_mb

ASK_S = 0.5  # seconds between two looks for a question
ANSWER_S = 60.0
TYPES_SHOWN = 400


@dataclass(frozen=True, slots=True)
class Inside:
    """Live objects that the garbage collector tracks, by type, and asyncio tasks."""

    objects: int
    tasks: int
    by_type: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ProcessCounts:
    """files: open descriptors other than sockets. inside: None: the program was not observed."""

    pid: int
    rss_mb: float
    threads: int
    sockets: int
    files: int
    inside: Inside | None

    @staticmethod
    def of(pid: int, inside: Inside | None = None) -> "ProcessCounts":
        process = Path(f"/proc/{pid}")
        targets = [_target(entry) for entry in (process / "fd").iterdir()]
        sockets = sum(target.startswith("socket:") for target in targets)
        threads = len(list((process / "task").iterdir()))
        return ProcessCounts(pid, rss_mb(pid), threads, sockets, len(targets) - sockets, inside)


def _target(entry: Path) -> str:
    try:
        return str(entry.readlink())
    except FileNotFoundError:
        return ""  # the descriptor was closed meanwhile


class CountQuestion:
    """A question and its answer, in two files: `PATH.ask` asks for `PATH`."""

    def __init__(self, path: Path) -> None:
        self._answer, self._ask = path, path.with_name(f"{path.name}.ask")

    def ask(self) -> Inside:
        """Ask, and wait for the answer; blocking. Fault: no answer came."""
        self._answer.unlink(missing_ok=True)
        self._ask.touch()
        deadline = time.monotonic() + ANSWER_S
        while not self._answer.exists():
            if time.monotonic() > deadline:
                raise Fault(f"no counts in {self._answer} after {ANSWER_S:.0f} s")
            time.sleep(ASK_S / 4)
        return Inside(**json.loads(self._answer.read_text()))

    def answer_once(self) -> None:
        """Wait for a question, and answer it; blocking."""
        while not self._ask.exists():
            time.sleep(ASK_S)
        self._ask.unlink()
        spare = self._answer.with_name(f"{self._answer.name}.part")
        spare.write_text(json.dumps(asdict(_inside())))
        spare.rename(self._answer)

    def answer_in_a_thread(self) -> None:
        """Answer every question until this program ends."""
        threading.Thread(target=self._answer_again, name="soak-counts", daemon=True).start()

    def _answer_again(self) -> None:
        while True:
            self.answer_once()


def _inside() -> Inside:
    gc.collect()
    objects = gc.get_objects()
    types = Counter(f"{type(each).__module__}.{type(each).__qualname__}" for each in objects)
    tasks = sum(issubclass(type(each), asyncio.Task) and not each.done() for each in objects)
    return Inside(len(objects), tasks, dict(types.most_common(TYPES_SHOWN)))
