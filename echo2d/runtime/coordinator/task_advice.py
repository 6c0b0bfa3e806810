"""What to do about a failing task, in one clause; and its failures in the log, each kind once."""

import logging

from echo2d.config.tasks import TaskTable
from echo2d.tasks.process import TaskFailed

# Words of what fails where a task has no network, or may start no further process.
_NETWORK = (
    "ConnectError", "ConnectionError", "Network is unreachable", "Name or service not known",
    "Temporary failure in name resolution", "Cannot connect", "URLError", "gaierror", "ConnectTimeout",
)  # fmt: skip


# Kinds of failures of a task that are logged with their tracebacks.
KINDS_LOGGED_MAX = 16

log = logging.getLogger("echo2d.task")


class FailureLog:
    """Logs each kind of failure of a task once, with the traceback; further ones are in the status."""

    def __init__(self, task: str, table: TaskTable | None = None) -> None:
        self._task, self._table = task, table or TaskTable(kind=task)
        self._logged: set[str] = set()

    def tell(self, failed: TaskFailed) -> str:
        """Returns what is said of it, in one line, with what to do."""
        todo = advice(failed, self._table)
        said = f"{failed.kind}: {failed}{f'; {todo}' if todo else ''}"
        kind = failed.at or failed.reason
        if kind not in self._logged and len(self._logged) < KINDS_LOGGED_MAX:
            self._logged.add(kind)
            trace = f"\n{failed.trace.rstrip()}" if failed.trace else ""
            log.warning("task=%s failed: %s%s", self._task, said, trace)
        return said


def advice(failed: TaskFailed, table: TaskTable) -> str:
    """Empty: nothing is known to help."""
    said = failed.reason
    if any(word in said for word in _NETWORK) and not table.network:
        return "a task has no network unless task.network = true"
    if "ModuleNotFoundError" in said or "there is no module" in said:
        return "put the module beside run.toml, name its folder in run.modules, or install it"
    if "left processes behind" in said:
        return (
            "end a process pool before the reward returns: a task's processes end with its call "
            "(docs/tasks.md)"
        )
    if "MemoryError" in said or "Cannot allocate memory" in said:
        return f"task.memory_bytes_max is {table.memory_bytes_max:,}"
    if failed.kind == "timeout" or said.startswith("no answer in "):
        return f"task.timeout_s is {table.timeout_s:g}, task.cpu_s_max {table.cpu_s_max}"
    if "PermissionError" in said or "Permission denied" in said:
        return "task.read_paths names what a task may read besides its rows"
    return ""
