"""A task that tries to get out of its process; used by test_containment.py. A reward of 1.0 means that it got out."""

import ctypes
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from echo2d.tasks.base import Prompt
from echo2d.tasks.confinement import SCRATCH, SCRATCH_FILES_MAX

WAYS = (
    "tell", "read the key", "list the run directory", "read the coordinator's environment",
    "read the coordinator's memory", "read the coordinator's descriptors",
    "signal the coordinator", "signal the guard", "signal the others", "become root", "become another user",
    "write into the working directory", "write into the run directory",
    "write into the installation", "use more memory", "write longer files", "open more files",
    "start more processes", "open many files", "mount", "call the coordinator", "spin on",
    "leave a session behind", "leave a session behind and die",
    "fill the directories of everybody",
)  # fmt: skip


class EscapingTask:
    name = "escaping"
    stop_token_ids = (1,)

    def __init__(self, notes: str, run_dir: str, coordinator: int, port: int) -> None:
        self._notes, self._run_dir, self._coordinator, self._port = (
            Path(notes),
            Path(run_dir),
            coordinator,
            port,
        )

    def prompt(self, index: int) -> Prompt:
        return Prompt([index + 1], WAYS[index])

    def reward(self, prompt: Prompt, output: Sequence[int]) -> float:
        """OSError or a similar error: it did not get out."""
        ways: dict[str, Callable[[], Any]] = {
            "read the key": lambda: (self._run_dir / "run.key").read_text(),
            "list the run directory": lambda: list(self._run_dir.iterdir()),
            "read the coordinator's environment": lambda: Path(
                f"/proc/{self._coordinator}/environ"
            ).read_bytes(),
            "read the coordinator's memory": lambda: os.open(
                f"/proc/{self._coordinator}/mem", os.O_RDONLY
            ),
            "read the coordinator's descriptors": lambda: os.listdir(  # noqa: PTH208
                f"/proc/{self._coordinator}/fd"
            ),
            "signal the coordinator": lambda: os.kill(self._coordinator, 0),
            "signal the guard": lambda: os.kill(os.getppid(), 0),
            "signal the others": self._signal_others,
            "become root": lambda: os.setuid(0),
            "become another user": lambda: os.setuid(1),
            "write into the working directory": lambda: Path("escaped").write_text("x"),
            "write into the run directory": lambda: (self._run_dir / "escaped").write_text("x"),
            "write into the installation": lambda: (
                Path(__file__).with_name("escaped").write_text("x")
            ),
            "use more memory": lambda: self._raise(resource.RLIMIT_AS),
            "write longer files": lambda: self._raise(resource.RLIMIT_FSIZE),
            "open more files": lambda: self._raise(resource.RLIMIT_NOFILE),
            "start more processes": lambda: self._raise(resource.RLIMIT_NPROC),
            "open many files": lambda: [os.open("/dev/null", os.O_RDONLY) for _ in range(10_000)],
            "mount": lambda: _call("mount", b"none", b"/tmp", b"tmpfs", 0, None),
            "call the coordinator": lambda: socket.socket().connect((b"127.0.0.1", self._port)),
            "spin on": self._spin_on,
            "leave a session behind": self._leave,
            "fill the directories of everybody": self._fill,
            "leave a session behind and die": self._leave_and_die,
        }
        if prompt.secret == "tell":
            self._tell()
            return 0.0
        ways[str(prompt.secret)]()
        return 1.0

    def _raise(self, what: int) -> None:
        resource.setrlimit(what, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    def _fill(self) -> None:
        """Make files until the room or the permitted number of files is used up."""
        for folder in SCRATCH:
            with suppress(OSError):  # no room is left
                for number in range(2 * SCRATCH_FILES_MAX):
                    (folder / str(number)).touch()
            assert 0 < len(list(folder.iterdir())) <= SCRATCH_FILES_MAX

    def _spin_on(self) -> None:
        signal.signal(signal.SIGXCPU, signal.SIG_IGN)
        while True:
            pass

    def _leave(self) -> None:
        """Start a grandchild in a new session, which ignores signals and would outlive this process."""
        ready, told = os.pipe()
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                for number in (signal.SIGTERM, signal.SIGHUP):
                    signal.signal(number, signal.SIG_IGN)
                with self._notes.open("a") as file:
                    file.write(f"{os.getpid()}\n")
                os.write(told, b"x")
                time.sleep(600)
            os._exit(0)
        os.wait()
        os.read(ready, 1)

    def _leave_and_die(self) -> None:
        self._leave()
        os._exit(1)

    def _signal_others(self) -> None:
        """Send the harmless signal 0 to all processes except this one and its guard. PermissionError: none gets it."""
        found = {int(each.name) for each in Path("/proc").iterdir() if each.name.isdecimal()}
        reached = []
        for pid in found - {os.getpid(), os.getppid()}:
            with suppress(OSError):
                os.kill(pid, 0)
                reached.append(pid)
        if not reached:
            raise PermissionError("no other process may be signalled")

    def _tell(self) -> None:
        facts = {
            "pid": os.getpid(),
            "uid": os.getuid(),
            "groups": os.getgroups(),
            "umask": os.umask(0o077),
            "environment": sorted(os.environ),
            "descriptors": sorted(_descriptor(entry) for entry in Path("/proc/self/fd").iterdir()),
            "network": os.readlink("/proc/self/ns/net"),  # noqa: PTH115 - not a path
            "status": dict(
                line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines()
            ),
        }
        self._notes.with_name(f"facts-{os.getuid()}").write_text(repr(facts))


def _descriptor(entry: Path) -> str:
    try:
        return entry.readlink().name.partition(":")[0]
    except OSError:
        return "itself"  # the descriptor that lists the others


def _call(name: str, *arguments: Any) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), name)
