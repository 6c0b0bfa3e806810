"""Tells a worker's owner what it does: a line on the terminal, and sometimes a line in the log.

While the worker receives or loads a version, `ProgressMeter` decides when the log gets a line, so that a
version that is received within seconds has only the lines `verified` and `serving`. Once an hour
`working` says what the worker has done since the last such line.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Protocol

from echo2d.core.worker.progress import LINE_S, Progress, ProgressMeter, Stage, clock
from echo2d.logs import say

# Seconds between two updates of the terminal.
SHOW_S = 0.5
# Seconds between two log lines about the work done.
WORKED_S = 3600.0

log = logging.getLogger("echo2d.worker")

# (words, share) -> shows the words, and the share of it that is done (None: not known)
Show = Callable[[str, float | None], None]


@dataclass(frozen=True, slots=True)
class Worked:
    """What a worker has done since it started: answers and their tokens, and bytes of versions."""

    answers: int = 0
    tokens: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0

    def since(self, before: "Worked") -> dict[str, int]:
        """The differences from `before`, by name."""
        now, then = asdict(self), asdict(before)
        return {name: count - then[name] for name, count in now.items()}


class ToldWorker(Protocol):
    """What the teller needs of a worker."""

    @property
    def serves(self) -> bool:
        """Whether some version is served."""

    def stage(self) -> Stage | None:
        """The work on a version that is not served yet. None: there is no such version."""

    def worked(self) -> Worked: ...

    def words(self) -> str:
        """What the worker does while `stage` is None."""


class ProgressTeller:
    """show: None if there is no terminal."""

    def __init__(self, show: Show | None = None) -> None:
        self._show = show or _nowhere

    @asynccontextmanager
    async def doing(self, kind: str, text: str) -> AsyncIterator[None]:
        """Show this text while the block runs. An exception of the block is raised in a group."""
        say(log, logging.INFO, kind, text)
        async with asyncio.TaskGroup() as tasks:
            telling = tasks.create_task(self._tell_time(kind, text))
            try:
                yield
            finally:
                telling.cancel()

    async def _tell_time(self, kind: str, text: str) -> None:
        clock_s, told = asyncio.get_running_loop().time, 1
        began_at = clock_s()
        while True:
            took_s = clock_s() - began_at
            self._show(f"{kind} {text} {clock(took_s)}", None)
            if took_s >= told * LINE_S:
                told += 1
                say(log, logging.INFO, kind, f"{text} {clock(took_s)}")
            await asyncio.sleep(SHOW_S)

    async def tell(self, worker: ToldWorker) -> None:
        """Show what this worker does until cancelled."""
        meter, clock_s = ProgressMeter(), asyncio.get_running_loop().time
        worked, worked_at = worker.worked(), clock_s()
        while True:
            now, stage = clock_s(), worker.stage()
            progress = meter.update(stage or Stage(""), now)
            self._show(worker.words() if stage is None else _words(progress), progress.stage.share)
            if stage is not None and meter.line_due(now, serving=worker.serves):
                say(log, logging.INFO, stage.what, progress.words(), version=stage.version)
            if now - worked_at >= WORKED_S:
                say(log, logging.INFO, "working", worker.words(), **worker.worked().since(worked))
                worked, worked_at = worker.worked(), now
            await asyncio.sleep(SHOW_S)


def _words(progress: Progress) -> str:
    return f"{progress.stage.what} version {progress.stage.version}: {progress.words()}"


def _nowhere(words: str, share: float | None) -> None:
    """Show nothing, because there is no terminal."""
