"""`echo2d run`: coordinator, local workers and learner of a run, started and watched by one program.

    coordinate --coordinator.json exists--> join, ...  and  learn
    a program ends with 0: the learner: the run is done, and all end; another program: it was told to end
                        2: an operator's mistake, which another start would repeat: all end
                        1: it is started again after a pause, a learner with --resume

An operator can start the same programs by hand, with the same files. So a run that this program began may
be continued by hand, and the other way round, and workers on other hosts may join. The lines of all programs
are one log, each with the name of its program. Not here: what a program does.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from echo2d.config.coordinator import CoordinatorConfig
from echo2d.config.tables import read_toml, table_of
from echo2d.config.worker import WorkerConfig
from echo2d.errors import Fault, OperatorFault
from echo2d.logs import STORY
from echo2d.runtime.run_dir.run_directory import COORDINATOR_FILE, find_coordinator
from echo2d.runtime.run_dir.tokens import create_token
from echo2d.store.sealed import unsealed
from echo2d.tasks.confinement import PR_SET_PDEATHSIG, prctl

# A coordinator with many tasks takes a while to listen.
LISTENS_S_MAX = 900.0
_LOOK_S = 0.2
# A program that fails more than FAILURES_MAX times within FAILURES_S seconds is not started again.
FAILURES_MAX, FAILURES_S = 5, 900.0
PAUSE_S_MIN, PAUSE_S_MAX = 1.0, 30.0
# The time for a program to end after SIGTERM: a learner ends its step and saves it.
_STOP_S = 120.0
COORDINATOR, LEARNER = "coordinator", "learner"

# Lines of this area are about one lease or group each, so there are many of them.
_OF_EACH_GROUP = f"level=INFO area={STORY} "


@dataclass(slots=True)
class Supervised:
    """A program, and how often it failed lately."""

    name: str
    argv: Sequence[str]
    again: Sequence[str] = ()  # more arguments, for every start but the first
    process: "subprocess.Popen[bytes] | None" = None
    last: str = ""
    failed_at: list[float] = field(default_factory=list)
    starts_at: float = 0.0
    reader: threading.Thread | None = None

    @property
    def pause_s(self) -> float:
        """The pause before the program is started again."""
        return min(PAUSE_S_MAX, PAUSE_S_MIN * 2.0 ** (len(self.failed_at) - 1))


class _Say(Protocol):
    def __call__(self, line: str, *, minor: bool = False) -> None:
        """Take a line of the log. minor: the line is one of many such lines, about a single lease or group."""


class OneHost:
    """The programs of one run. say: takes the log's lines. settings: the --set values, as for `echo2d coordinate`."""

    def __init__(
        self, path: Path, config: CoordinatorConfig, settings: Sequence[str], say: _Say
    ) -> None:
        self._path, self._config, self._say = path.absolute(), config, say
        of_workers = [each for each in settings if each.startswith("worker.")]
        self._settings = [f"--set={each}" for each in settings if each not in of_workers]
        self._worker_settings = [f"--set={each.removeprefix('worker.')}" for each in of_workers]
        self._programs: list[Supervised] = []
        self._stopping = threading.Event()

    # --- called in the caller's thread

    def run(self, workers: int, *, resume: bool) -> int:
        """Run until the learner has made its last step, or `stop` was called. Returns the exit code.

        Fault: a program failed for good.
        """
        config = f"--config={self._path}"
        try:
            coordinator = self._start(COORDINATOR, "coordinate", config, *self._settings)
            self._wait_until_it_listens(coordinator)
            self._tell_page()
            for number in range(1, workers + 1):
                self._start_worker(f"worker-{number}", workers)
            again = ("--resume",)
            first = again if resume else ()
            learner = self._start(
                LEARNER, "learn", config, *self._settings, again=again, first=first
            )
            while not self._stopping.is_set():
                if learner.process is not None and learner.process.poll() == 0:
                    self._say("the learner has made its last step")
                    break
                self._look()
                self._stopping.wait(_LOOK_S)
        finally:
            self._stop_all()
        return 0

    def stop(self) -> None:
        """Stop all programs, the second time at once. A signal handler may call it."""
        if self._stopping.is_set():
            for each in self._programs:
                if each.process is not None and each.process.poll() is None:
                    os.killpg(each.process.pid, signal.SIGKILL)
        self._stopping.set()

    # --- inside

    def _start(
        self, name: str, *words: str, again: Sequence[str] = (), first: Sequence[str] = ()
    ) -> Supervised:
        program = Supervised(name, [sys.executable, "-m", "echo2d", *words], again)
        self._programs.append(program)
        self._spawn(program, first)
        return program

    def _spawn(self, program: Supervised, more: Sequence[str]) -> None:
        program.process = subprocess.Popen(
            [*program.argv, *more],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_end_with_parent,
            cwd=Path.cwd(),
        )
        program.reader = threading.Thread(target=self._read, args=(program,), daemon=True)
        program.reader.start()

    def _read(self, program: Supervised) -> None:
        assert program.process is not None
        assert program.process.stdout is not None
        for raw in program.process.stdout:
            line = raw.decode(errors="replace").rstrip("\n")
            program.last = line or program.last
            self._say(f"{program.name:<11} {line}", minor=_OF_EACH_GROUP in line)

    def _tell_page(self) -> None:
        run_dir = self._config.run.run_dir
        with suppress(OperatorFault):
            url, token_file = find_coordinator(run_dir)
            self._say(f"its page: {url}/ with the secret in {token_file}")

    def _start_worker(self, name: str, workers: int) -> None:
        run_dir, folder = self._config.run.run_dir, self._path.parent
        token = folder / f"{name}.token"
        if not token.exists():
            # A local worker joins once with its token, so the token may expire after 30 days.
            create_token(
                run_dir, name, role="worker", url=None, out=token, max_workers=1, expires="30d"
            )
        words = [f"--token-file={token}", f"--state-dir={folder / name}", f"--name={name}"]
        if self._config.run.base_model is not None:
            words.append(f"--base-model={self._config.run.base_model}")
        table = table_of(read_toml(self._path), WorkerConfig.TABLE)
        if table:
            words.append(f"--config={self._path}")
        if "threads" not in table and not any("threads=" in e for e in self._worker_settings):
            # The learner and the workers share the processors.
            threads = max(1, (os.cpu_count() or 1) // (workers + 1))
            words.append(f"--threads={threads}")
        self._start(name, "join", *words, *self._worker_settings)

    def _wait_until_it_listens(self, coordinator: Supervised) -> None:
        """Wait until the coordinator has announced its address. Fault: it ended instead."""
        announced = self._config.run.run_dir / COORDINATOR_FILE
        assert coordinator.process is not None
        deadline = time.monotonic() + LISTENS_S_MAX
        while _announced_by(announced) != coordinator.process.pid:
            if self._stopping.wait(_LOOK_S):
                return
            if (code := coordinator.process.poll()) is not None:
                raise self._to_fault(coordinator, code)
            if time.monotonic() > deadline:
                raise Fault(f"the coordinator does not listen after {LISTENS_S_MAX:.0f} s")

    def _look(self) -> None:
        """Restart the programs that have failed. Fault: a program has failed for good."""
        now = time.monotonic()
        for program in self._programs:
            if program.process is None:
                if now >= program.starts_at:
                    self._spawn(program, program.again)
                continue
            code = program.process.poll()
            if code is None or (code == 0 and program.name != COORDINATOR):
                continue
            if code == 0:
                raise self._to_fault(program, code)
            program.failed_at = [at for at in program.failed_at if now - at < FAILURES_S] + [now]
            if code == _MISTAKE or len(program.failed_at) > FAILURES_MAX:
                raise self._to_fault(program, code)
            program.process, program.starts_at = None, now + program.pause_s
            self._say(
                f"the {program.name} ended with {code}; it starts again in {program.pause_s:g} s"
            )

    def _to_fault(self, program: Supervised, code: int) -> Fault:
        if program.reader is not None:
            program.reader.join(_LOOK_S)
        said = program.last.removeprefix("echo2d: ").removeprefix("learner: ")
        kind = OperatorFault if code == _MISTAKE else Fault
        return kind(f"the {program.name} ended with {code}: {said}")

    def _stop_all(self) -> None:
        """Stop the learner first, which saves its step, then the workers, and last the coordinator."""
        learners = [each for each in self._programs if each.name == LEARNER]
        workers = [each for each in self._programs if each.name not in (COORDINATOR, LEARNER)]
        for together in (learners, workers, self._programs[:1]):
            for each in together:
                if each.process is not None and each.process.poll() is None:
                    each.process.send_signal(signal.SIGTERM)
            for each in together:
                if each.process is not None:
                    _wait(each.process)
                if each.reader is not None:
                    each.reader.join(_LOOK_S)


_MISTAKE = 2  # the exit code of the operator's mistakes


def _announced_by(path: Path) -> int | None:
    """The id of the process that wrote where a coordinator listens. None: none has."""
    with suppress(OSError, ValueError, KeyError):
        return int(unsealed(path.read_bytes())["pid"])
    return None


def _wait(process: "subprocess.Popen[bytes]") -> None:
    """Wait for the program's end, kill what is left of its process group, and wait again."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _end_with_parent() -> None:
    """In the child: let the kernel send SIGTERM when `echo2d run` ends, however it ends."""
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
