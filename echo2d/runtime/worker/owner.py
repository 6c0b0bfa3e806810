"""Obeys the owner of a box: hours of work, no other program on a GPU, pause and resume.

    starts --> waits --may work--> loads, works --must not--> hands back, says goodbye --> starts
                 ^                                                                          |
                 +------------------ the same process, as a new program --------------------+

A waiting process has loaded no engine, so a paused box uses no GPU memory: only a new program releases all
that a driver has allocated. The process keeps its id, so a service manager sees one running service. The
pause is a file in the state directory and survives restarts. Only compute programs count as others, because
a desktop always uses its GPU.
Not here: which answer follows from which facts (`core/worker/working_hours.py`).
"""

import asyncio
import logging
import os
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

from echo2d.config.worker import WorkerConfig
from echo2d.core.worker.working_hours import reason_to_wait
from echo2d.errors import OperatorFault, path_fault
from echo2d.logs import say
from echo2d.runtime.process.lifecycle import Ending
from echo2d.runtime.worker.progress import Show
from echo2d.sd_notify import Notifier
from echo2d.store.disk import replace_file

# Seconds between two checks of the clock and the pause.
OWNER_LOOK_S = 2.0
# Seconds between two calls of nvidia-smi, which takes a second without its daemon.
GPU_LOOK_S = 10.0
# Another program counts as running for this long after it was last seen, because its next part may start soon.
GPU_FREE_S = 60.0
# If a start takes longer than this, it hangs, and the watchdog may end it. This is also the unit's TimeoutStartSec.
_START_S_MAX = 900.0

_PAUSED = "paused"

log = logging.getLogger("echo2d.worker")


class Withdrawn(Exception):  # noqa: N818 - the owner's wish
    """The owner wants the box back while the worker is still starting."""


class Owner:
    """See the module docstring. clock: monotonic seconds.

    OperatorFault: nvidia-smi is needed and does not answer. Blocking.
    """

    def __init__(self, config: WorkerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._windows, self._paused = config.windows, config.state_dir / _PAUSED
        self._clock = clock
        self._others: Sequence[int] = ()
        self._seen_at = self._ask_at = clock()
        self._asks = config.only_when_idle
        # Called to hand the work back. None: the worker is still starting.
        self.withdraw: Callable[[str], None] | None = None
        if self._asks and _other_programs() is None:
            raise OperatorFault(
                "worker.only_when_idle: nvidia-smi must say which programs use the GPUs, and does not "
                "answer: install the NVIDIA driver, or leave only_when_idle out"
            )

    def look(self) -> str:
        """Why the worker must wait; empty: it may work. Blocking."""
        now = self._clock()
        if self._asks and now >= self._ask_at:
            self._ask_at, found = now + GPU_LOOK_S, _other_programs()
            if found:
                self._others, self._seen_at = found, now
            elif found is not None and now >= self._seen_at + GPU_FREE_S:
                self._others = ()
        local = time.localtime()
        return reason_to_wait(
            60 * local.tm_hour + local.tm_min,
            self._windows,
            paused=self._paused.exists(),
            others=self._others,
        )

    async def wait(self, service: Notifier, show: Show | None) -> bool:
        """Wait until the box may work. False: the process was told to end."""
        reason, told = await asyncio.to_thread(self.look), ""
        if not reason:
            return True
        stopped = asyncio.Event()
        with Ending() as ending:
            ending.by_signals(lambda _: stopped.set(), lambda _: stopped.set())
            while reason and not stopped.is_set():
                if reason != told:
                    say(log, logging.INFO, "waiting", reason)
                told = reason
                service.turned(partial(str, reason))
                if show is not None:
                    show(f"waiting {reason}", None)
                with suppress(TimeoutError):
                    async with asyncio.timeout(service.wait_s(OWNER_LOOK_S)):
                        await stopped.wait()
                reason = await asyncio.to_thread(self.look)
        if stopped.is_set():
            service.stopping("stopping")
        return not stopped.is_set()

    @asynccontextmanager
    async def watching(self, service: Notifier) -> AsyncIterator[None]:
        """While the block runs, call `withdraw` once the box must no longer work. Exceptions are raised in a group.

        `Withdrawn`: there was no `withdraw` yet, and the block was cancelled.
        """
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(self._watch(service))
            try:
                yield
            finally:
                watch.cancel()

    async def _watch(self, service: Notifier) -> None:
        until = self._clock() + _START_S_MAX
        while not (reason := await asyncio.to_thread(self.look)):
            if self.withdraw is None and self._clock() < until:
                service.alive("starting")
            await asyncio.sleep(OWNER_LOOK_S)
        if self.withdraw is None:
            raise Withdrawn(reason)
        self.withdraw(reason)


def set_paused(state_dir: Path, *, paused: bool) -> None:
    """Pause the worker of this state directory, or let it work again. OperatorFault: this is no state directory."""
    file = state_dir / _PAUSED
    try:
        if not (state_dir / "format").is_file():
            raise OperatorFault(
                f"{state_dir} is not the state directory of a worker; expected the --state-dir of its "
                "`echo2d join`"
            )
        if paused:
            replace_file(file, b"", durable=True)
        else:
            file.unlink(missing_ok=True)
    except OSError as error:
        raise path_fault(f"cannot use {file}", error) from error


def _other_programs() -> list[int] | None:
    """The processes on the GPUs other than this one and its children. None: nvidia-smi does not answer."""
    command = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"]
    try:
        # If the driver hangs, nvidia-smi is ended after 20 s, and the last known programs still count.
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20.0)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    pids = [line.partition(",")[0].strip() for line in done.stdout.splitlines()]
    return [int(pid) for pid in pids if pid.isdigit() and not _is_ours(int(pid))]


def _is_ours(pid: int) -> bool:
    while pid > 1 and pid != os.getpid():
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            # The process has ended, or /proc hides it because it is another user's.
            return False
        pid = int(stat.rpartition(")")[2].split()[1])
    return pid == os.getpid()
