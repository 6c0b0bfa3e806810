"""Says in one clause what to do about a failing task, and logs each kind of its failures once."""

import logging
import re
from pathlib import Path

from echo2d.config.tasks import TaskTable
from echo2d.tasks.process import TaskFailed

# Words in the errors of a task that needs the network and has none.
_NETWORK = (
    "ConnectError", "ConnectionError", "Network is unreachable", "Name or service not known",
    "Temporary failure in name resolution", "Cannot connect", "URLError", "gaierror", "ConnectTimeout",
)  # fmt: skip
# Matches source code that writes a file.
_WRITES = re.compile(r"""open\(.*["'][rbt]*[wax+][bt+]*["']|write_|mkdir|makedirs""")


log = logging.getLogger("echo2d.task")


class FailureLog:
    """Logs each kind of failure of a task once, with the traceback; further ones are in the status."""

    def __init__(self, task: str, table: TaskTable | None = None) -> None:
        self._task, self._table = task, table or TaskTable(kind=task)
        self._logged: set[str] = set()

    def told(self, failed: TaskFailed) -> str:
        return told(failed, self._table)

    def tell(self, failed: TaskFailed) -> str:
        """Log the failure, if its kind is new; returns it in one line, with what to do."""
        said = f"{failed.kind}: {self.told(failed)}"
        kind = failed.at or failed.reason
        # Log up to 16 kinds of failures with their tracebacks.
        if kind not in self._logged and len(self._logged) < 16:
            self._logged.add(kind)
            trace = f"\n{failed.trace.rstrip()}" if failed.trace else ""
            log.warning("task=%s failed: %s%s", self._task, said, trace)
        return said


def told(failed: TaskFailed, table: TaskTable) -> str:
    """The failure, and what to do about it."""
    todo = advice(failed, table)
    return f"{failed}; {todo}" if todo else str(failed)


def advice(failed: TaskFailed, table: TaskTable) -> str:
    """What to do about the failure. Empty: nothing is known to help."""
    said = failed.reason
    if any(word in said for word in _NETWORK) and not table.network:
        return "a task has no network unless task.network = true"
    if "run.modules" in said:
        return ""
    if "relative import" in said:
        return "import the other module by its whole name: a file beside run.toml is in no package"
    if "ModuleNotFoundError" in said or "there is no module" in said:
        return "put the module beside run.toml, name its folder in run.modules, or install it"
    if "left processes behind" in said:
        return (
            "end a process pool before the reward returns: a task's processes end with its call "
            "(docs/guide/tasks.md)"
        )
    if "MemoryError" in said or "Cannot allocate memory" in said:
        return f"task.memory_bytes_max is {table.memory_bytes_max:,}"
    if failed.kind == "timeout" or said.startswith("no answer in "):
        return f"task.timeout_s is {table.timeout_s:g}, task.cpu_s_max {table.cpu_s_max}"
    if said.startswith("KeyError: ") and "environ" in failed.trace:
        return "a task has only the variables of this host that task.environment names"
    return _advice_on_files(failed)


def _advice_on_files(failed: TaskFailed) -> str:
    said = failed.reason
    found = re.search(r"\[Errno (?:1|2|13|30)\] [^:]*: '([^']+)'", said)
    if found is None:
        return ""
    path = Path(found[1])
    if "Read-only" in said or _WRITES.search(failed.trace):
        return "a task may write only in its own temporary folder, tempfile.gettempdir()"
    if "No such file" not in said or (path.is_absolute() and path.exists()):
        return "name the file in task.read_paths: a task can read only these and its rows"
    if not path.is_absolute() and path.suffix:
        return (
            "give the whole path, and name the file in task.read_paths: a task runs in the folder /"
        )
    return ""
