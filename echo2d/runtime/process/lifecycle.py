"""The life of a daemon as a process: its event loop, the signals that end it, and an end that comes in any case.

    starts --SIGTERM or SIGINT--> gone at once, by that signal
    runs --first SIGTERM or SIGINT--> ends in order --within STOP_S_MAX--> gone, exit code 0
                                          | second signal --> gone at once, by that signal
                                          | STOP_S_MAX passed --> gone, exit code 1

After the program's last line its threads have EXIT_S_MAX: one that hangs in a disk or a driver keeps nobody waiting.
It may have FILES_MAX files and sockets open where the system lets it: a shell's usual 1024 are too few for all peers.
Not here: what ending in order means.
"""

import asyncio
import gc
import logging
import os
import resource
import signal
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self

import uvloop

STOP_S_MAX = 30.0  # last words over a slow line, engines, seed and task processes: each has bounds of its own below it
EXIT_S_MAX = (
    5.0  # then nothing of use is under way; TimeoutStopSec of the units is above both together
)
FILES_MAX = 1 << 16  # as in the units
SIGNALS = (signal.SIGTERM, signal.SIGINT)
GC_THRESHOLDS = (
    10_000,
    20,
    200,
)  # a full collection after 40 million objects more than were freed, not 70 thousand

log = logging.getLogger("echo2d.runtime")


def run_daemon(program: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Run it to its end; the exit code."""

    async def main() -> int:
        code = 1
        try:
            code = await program()
        finally:
            _end_in(EXIT_S_MAX, code, "threads hang")
        return code

    _raise_files()
    code: int = uvloop.run(main())
    return code


def _raise_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < min(FILES_MAX, hard):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(FILES_MAX, hard), hard))


def collect_rarely() -> None:
    """Once all that stays is there: a collection looks at every object and finds little, as reference counts do."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


class Ending:
    """Entered before anything that takes time to end, left when all of that has ended."""

    def __init__(self) -> None:
        self._timer: threading.Timer | None = None
        self._loop = asyncio.get_running_loop()

    def by_signals(
        self, stop: Callable[[str], None], leave: Callable[[str], None] | None = None
    ) -> None:
        """From now on the first signal calls `stop` with its name, and each SIGUSR1 `leave`."""
        if leave is not None:
            self._loop.add_signal_handler(signal.SIGUSR1, leave, signal.SIGUSR1.name)
        for number in SIGNALS:
            self._loop.add_signal_handler(number, self._first, number, stop)

    def _first(self, number: signal.Signals, stop: Callable[[str], None]) -> None:
        self._remove_handlers()
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        self._timer = _end_in(STOP_S_MAX, 1, "it did not end in order")
        stop(number.name)

    def _remove_handlers(self) -> None:
        for number in SIGNALS:
            self._loop.remove_signal_handler(number)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove_handlers()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._timer is not None:
            self._timer.cancel()


def _end_in(delay_s: float, code: int, reason: str) -> threading.Timer:
    def end() -> None:
        log.error("ended at once code=%d reason=%s after_s=%g", code, reason, delay_s)
        os._exit(code)

    timer = threading.Timer(delay_s, end)
    timer.daemon = True
    timer.start()
    return timer
