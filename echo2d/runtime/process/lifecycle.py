"""The process of a daemon: runs its event loop, handles signals, and ends in bounded time.

    starts --SIGTERM--> ended at once by that signal
    starts --SIGINT--> the start is cancelled, then ended by that signal
    runs --first SIGTERM or SIGINT--> stops in order --within STOP_S_MAX--> ended, exit code 0
                                          | second signal --> ended at once by that signal
                                          | STOP_S_MAX passed --> ended, exit code 1

After the program has returned, its threads have EXIT_S_MAX: a thread that hangs in a disk or a
driver does not keep the process alive. The limit of open files is raised to OPEN_FILES_MAX where the
system allows it, because a shell's usual 1024 are too few for all peers. Not here: what a daemon
does to end in order.
"""

import asyncio
import gc
import logging
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, Self

import uvloop

from echo2d.errors import Fault, first_fault, of_the_host
from echo2d.stop_signals import SIGNALS, stop_told

# The time for last messages over a slow line, and for engines, the seed and task processes to end. Each of
# these four has a shorter limit of its own.
STOP_S_MAX = 30.0
# The program has returned, so no useful work is left. TimeoutStopSec of the systemd units is longer than
# STOP_S_MAX and EXIT_S_MAX together.
EXIT_S_MAX = 5.0
# The same limit as in the systemd units.
OPEN_FILES_MAX = 1 << 16

log = logging.getLogger("echo2d.runtime")


def run_daemon(program: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Run a program to its end. Returns its exit code."""

    async def main() -> int:
        code = 1
        try:
            code = await program()
        finally:
            _end_in(EXIT_S_MAX, code, "its threads did not end")
        return code

    _raise_files()
    code: int = uvloop.run(main())
    return code


def _raise_files() -> None:
    """Raise the soft limit of open files to OPEN_FILES_MAX, or to the hard limit if that is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < min(OPEN_FILES_MAX, hard):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(OPEN_FILES_MAX, hard), hard))


def collect_rarely() -> None:
    """Make garbage collections rare. Call it once all long-lived objects exist.

    A full collection visits every object and stops the loop for that time. It finds little, because
    reference counting frees nearly everything.
    """
    gc.collect()
    gc.freeze()
    # A full collection starts when 40 million more objects were allocated than freed; with Python's
    # defaults it starts at 70,000. A collection of the second generation visits at most 50,000 objects
    # and stops the loop for some 50 ms.
    gc.set_threshold(*(10_000, 5, 800))


def outcome(group: BaseExceptionGroup[BaseException]) -> int:
    """The one catch-all: raise the group's first `Fault`, or a Fault about what this host lacks. Otherwise there is a
    bug: log it, and return exit code 1.
    """
    if (faults := group.subgroup(Fault)) is not None:
        raise first_fault(faults) from None
    errors = group.subgroup(OSError)
    if errors is not None and (lacks := of_the_host(first_fault(errors))) is not None:
        raise lacks from None
    log.critical("failed", exc_info=group)
    return 1


def start_again(more: Sequence[str] = ()) -> NoReturn:
    """Start this program again in this process, with `more` arguments, and release all other resources."""
    for each in list(Path("/proc/self/fd").iterdir()):
        # Close all files but the standard ones: a driver may have opened files that would stay open.
        with suppress(OSError):
            os.set_inheritable(int(each.name), each.name in {"0", "1", "2"})
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:], *more])  # noqa: S606


class Ending:
    """The orderly end of a daemon, as a context.

    Enter it before anything that takes time to end, and leave it when all of that has ended.
    """

    def __init__(self) -> None:
        self._timer: threading.Timer | None = None
        self._loop = asyncio.get_running_loop()

    def by_signals(
        self, stop: Callable[[str], None], leave: Callable[[str], None] | None = None
    ) -> None:
        """Install the signal handlers.

        The first SIGTERM or SIGINT calls `stop`, and each SIGUSR1 calls `leave`, with the name of
        the signal. The second SIGTERM or SIGINT ends the process, unless it follows at once (`stop_signals`).
        """
        if leave is not None:
            self._loop.add_signal_handler(signal.SIGUSR1, leave, signal.SIGUSR1.name)
        for number in SIGNALS:
            self._loop.add_signal_handler(number, self._first, number, stop)

    def _first(self, number: signal.Signals, stop: Callable[[str], None]) -> None:
        self._remove_handlers()
        stop_told()
        self._timer = _end_in(STOP_S_MAX, 1, "the daemon did not end in time")
        stop(number.name)

    def _remove_handlers(self) -> None:
        for number in SIGNALS:
            self._loop.remove_signal_handler(number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._remove_handlers()
        self._loop.remove_signal_handler(signal.SIGUSR1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._timer is not None:
            self._timer.cancel()


def _end_in(delay_s: float, code: int, reason: str) -> threading.Timer:
    """End the process after a delay, from a thread: the event loop may be what hangs."""

    def end() -> None:
        log.error("ended at once code=%d reason=%s after_s=%g", code, reason, delay_s)
        os._exit(code)

    timer = threading.Timer(delay_s, end)
    timer.daemon = True
    timer.start()
    return timer
