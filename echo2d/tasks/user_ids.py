"""The user ids of task processes: each belongs to one process of this host at a time.

    borrow: the first id whose lock is free --> a process runs as it --> give_back, or our end --> free again

Processes of one user may signal each other, and share the kernel's limit of processes. So two pools, two tasks and two
runs of a host never have an id in common. A lock is a file that only root may open, and the kernel lets it go with
the program that holds it.
"""

import fcntl
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from echo2d.errors import OperatorFault

# systemd leaves the first ids unused (containers have no others), and subordinate ids begin above the second ones.
TASK_UIDS = (*range(65520, 65534), *range(66000, 67000))
LOCKS = Path("/run/echo2d/task-users")
_UID_MAP = Path("/proc/self/uid_map")


class BorrowedUser:
    """A user id of one task process. `give_back` frees it, and so does the end of this program."""

    def __init__(self, uid: int, lock: BinaryIO) -> None:
        self.uid, self._lock = uid, lock

    @staticmethod
    def borrow() -> "BorrowedUser":
        """OperatorFault: all ids are in use, or locks cannot be kept here."""
        try:
            LOCKS.mkdir(parents=True, exist_ok=True, mode=0o700)
            for uid in _mapped(TASK_UIDS):
                lock = (LOCKS / str(uid)).open("ab")
                with suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
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

    def give_back(self) -> None:
        self._lock.close()


def _mapped(uids: Iterable[int]) -> list[int]:
    """Those that exist here: in a container there may be none above 65,535."""
    ranges = [list(map(int, line.split())) for line in _UID_MAP.read_text().splitlines()]
    return [uid for uid in uids if any(first <= uid < first + count for first, _, count in ranges)]
