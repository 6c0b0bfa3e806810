"""Child programs of a demo or test. Each has its own process group and log file, and leaves no process behind."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

from echo2d.errors import Fault
from echo2d.runtime.run_dir.tokens import create_token

STOP_S = 10.0  # a program that has not ended this long after SIGTERM is killed


class Program:
    """One running program. Its stdout and stderr go to `log`."""

    def __init__(self, name: str, argv: Sequence[str], log: Path) -> None:
        self.name = name
        self.log = log
        self._argv = argv
        self.start()

    def start(self, *more: str) -> None:
        """Start the program with these further arguments. It may be started again after it has ended."""
        with self.log.open("ab") as sink:
            self._process = subprocess.Popen(
                [*self._argv, *more],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def kill(self) -> None:
        """`kill -9` of this one process; its child processes are left running."""
        self._process.kill()
        self._process.wait()

    def terminate(self) -> None:
        if self.returncode is None:
            self._process.send_signal(signal.SIGTERM)

    def wait(self, timeout_s: float) -> int:
        """Wait for the return code. The program is killed after `timeout_s`. The rest of its process group is always
        killed.
        """
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def tail(self) -> str:
        """The end of the program's log, which shows a person why it failed."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-12:])


class Programs:
    """The programs of one run. At the end of the block all of them are stopped, the first one last.

    stop_s: a program that has not ended after this many seconds is killed.
    """

    def __init__(self, logs: Path, stop_s: float = STOP_S) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self._logs, self._stop_s = logs, stop_s
        self._running: list[Program] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, name: str, *arguments: str) -> Program:
        """Start `python arguments...`."""
        program = Program(name, [sys.executable, *arguments], self._logs / f"{name}.log")
        self._running.append(program)
        return program

    def __iter__(self) -> Iterator[Program]:
        return iter(self._running)

    def __getitem__(self, name: str) -> Program:
        return next(program for program in self._running if program.name == name)

    def check(self) -> None:
        """Fault: a program that should be running has ended; the text has the end of its log."""
        for program in self._running:
            if program.returncode not in (None, 0):
                raise Fault(
                    f"{program.name} ended with {program.returncode}; {program.log} ends:\n{program.tail()}"
                )

    def stop(self) -> None:
        """Send SIGTERM to all programs except the first (the coordinator), and last to the coordinator, so that the
        others can sign off.
        """
        for together in (self._running[1:], self._running[:1]):
            for program in together:
                program.terminate()
            for program in together:
                program.wait(self._stop_s)
        self._running.clear()


def children_of(pid: int) -> list[int]:
    """The living child processes of this process."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended meanwhile
            state, parent, *_ = (folder / "stat").read_text().rpartition(")")[2].split(maxsplit=2)
            found += [int(folder.name)] if parent == str(pid) and state != "Z" else []
    return found


def wait_for(path: Path, programs: Programs, timeout_s: float) -> str:
    """The text of a file that a program is about to write (atomically)."""
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        programs.check()
        if time.monotonic() > deadline:
            raise Fault(f"{path} did not appear within {timeout_s:.0f} s")
        time.sleep(0.02)
    return path.read_text()


# --- a worker for a coordinator on this machine


def start_worker(
    programs: Programs, name: str, run: Path, url: str, *flags: str, module: str = "echo2d"
) -> Program:
    """Start `echo2d join` with these flags and a credential of its own.

    run: the folder whose subfolder `coordinator` is the run directory. The worker's state is written there, and its
    token is made there at the first start. module: takes the place of echo2d.
    """
    token = run / f"{name}.token"
    if not token.exists():
        create_token(
            run / "coordinator",
            name,
            role="worker",
            url=url,
            out=token,
            max_workers=1,
            expires="7d",
        )
    own = (f"--token-file={token}", f"--state-dir={run / name}", f"--name={name}")
    return programs.start(name, "-m", module, "join", url, *own, *flags)
