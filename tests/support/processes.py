"""Processes of this machine, as /proc shows them."""

from pathlib import Path


def is_running(pid: int) -> bool:
    """False for a process that has ended, even if its parent has not waited for it yet (a zombie)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children(pid: int) -> set[int]:
    """The ids of all processes below this one: its children, their children, and so on."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found |= {child, *children(child)}
    return found
