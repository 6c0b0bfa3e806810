"""The user ids of task processes: each belongs to one process of this host at a time.

    borrow: the first id whose lock is free --> a process runs as it --> end_all, give_back, or our end --> free again

Processes of one user may signal each other, and share the kernel's limit of processes. So two pools, two tasks and two
runs of a host never have an id in common. A lock is a file that only root may open; the kernel releases it when the
program that holds it ends.
"""

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from echo2d.errors import OperatorFault

# systemd leaves the first range unused, and a container may have no higher ids. Subordinate ids begin above the
# second range.
TASK_UIDS = (*range(65520, 65534), *range(66000, 67000))
LOCKS = Path("/run/echo2d/task-users")
_UID_MAP = Path("/proc/self/uid_map")
# Kill, as this user, all processes that it may kill. No fork escapes, because the kernel signals all processes at once.
_END_ALL = (
    "import os, sys; uid = int(sys.argv[1]); "
    "os.setgroups([]); os.setgid(uid); os.setuid(uid); os.kill(-1, 9)"
)


class BorrowedUser:
    """A user id of one task process. `give_back` frees it, and so does the end of this program."""

    def __init__(self, uid: int, lock: BinaryIO) -> None:
        self.uid, self._lock = uid, lock

    @staticmethod
    def borrow() -> "BorrowedUser":
        """Lock a free id. OperatorFault: all ids are in use, or locks cannot be kept here."""
        try:
            LOCKS.mkdir(parents=True, exist_ok=True, mode=0o700)
            for uid in _mapped(TASK_UIDS):
                path = LOCKS / str(uid)
                lock = path.open("ab")
                with suppress(BlockingIOError, FileNotFoundError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    # The locked file may have been removed, and another one made under its name.
                    is_it = os.path.samestat(os.fstat(lock.fileno()), path.stat())
                    if is_it and not processes_of(uid):
                        return BorrowedUser(uid, lock)
                lock.close()
        except OSError as error:
            raise OperatorFault(
                f"user ids are locked in {LOCKS}, which cannot be used: {error.strerror}; with systemd, install "
                "systemd/tasks-apart.conf"
            ) from error
        raise OperatorFault(
            "all user ids for task processes of this host are in use; lower task.processes, or end another run"
        )

    def end_all(self) -> None:
        """Kill all processes that still run as this user. Blocking."""
        command = [sys.executable, "-I", "-S", "-c", _END_ALL, str(self.uid)]
        with suppress(subprocess.TimeoutExpired):
            subprocess.run(command, stderr=subprocess.DEVNULL, timeout=10.0, check=False)

    def give_back(self) -> None:
        self._lock.close()


def processes_of(uid: int) -> list[int]:
    """The processes of this host that run as the user, without zombies."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # ended meanwhile
            # The owner of the folder may be another user: it is root if the process is not dumpable.
            status = (folder / "status").read_text()
            runs = "State:\tZ" not in status and f"\nUid:\t{uid}\t" in status
            found += [int(folder.name)] if runs else []
    return found


def _mapped(uids: Iterable[int]) -> list[int]:
    """The ids that exist here: in a container there may be none above 65,535."""
    ranges = [list(map(int, line.split())) for line in _UID_MAP.read_text().splitlines()]
    return [uid for uid in uids if any(first <= uid < first + count for first, _, count in ranges)]
