"""How much of this machine others use: a fraction of a second can only be judged where nobody else computes."""

import os
from pathlib import Path

OTHERS_MAX = 0.1  # share of all cores; with more, our processes wait for theirs


def children(pid: int) -> set[int]:
    """All processes below this one."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found |= {child, *children(child)}
    return found


class Others:
    """Measures from when it is made."""

    def __init__(self) -> None:
        self._before = _ticks()

    def share(self) -> float:
        """Of all cores, so far."""
        whole, busy, mine = (now - then for now, then in zip(_ticks(), self._before, strict=True))
        return max(0.0, busy - mine) / max(1, whole)


def _ticks() -> tuple[int, int, int]:
    """Of all cores: passed, busy, busy for this process and those below it."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    idle = fields[3] + fields[4]
    return sum(fields), sum(fields) - idle, sum(map(_used, {os.getpid(), *children(os.getpid())}))


def _used(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return sum(map(int, fields[11:13]))
