"""What to do about a failing task, in one clause: which wall or limit it ran into."""

from echo2d.config.tasks import TaskTable
from echo2d.tasks.process import TaskFailed

# Words of what fails where a task has no network, or may start no further process.
_NETWORK = (
    "ConnectError", "ConnectionError", "Network is unreachable", "Name or service not known",
    "Temporary failure in name resolution", "Cannot connect", "URLError", "gaierror", "ConnectTimeout",
)  # fmt: skip
_MODULES = ("ModuleNotFoundError", "there is no module")


def advice(failed: TaskFailed, table: TaskTable) -> str:
    """Empty: nothing is known to help."""
    said = failed.reason
    if any(word in said for word in _NETWORK) and not table.network:
        return "a task has no network unless task.network = true"
    if any(word in said for word in _MODULES):
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
