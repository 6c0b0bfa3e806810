"""The CPU seconds of processes and of the machine, from /proc."""

import contextlib
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """cpu_s: user and system time of the process and of its children that have ended."""

    state: str
    parent: int
    own_cpu_s: float
    ended_cpu_s: float

    @staticmethod
    def of(pid: int) -> "ProcessFacts":
        """The facts of a process. OSError: it has ended."""
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        own, ended = (sum(map(int, words[at : at + 2])) / TICKS_PER_S for at in (11, 13))
        return ProcessFacts(words[0], int(words[1]), own, ended)


def processes() -> dict[int, ProcessFacts]:
    """All processes of this machine, by number."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended meanwhile
            found[int(folder.name)] = ProcessFacts.of(int(folder.name))
    return found


def cpu_s(pid: int) -> float:
    """The CPU seconds that a process has used, in all threads, without its children."""
    return ProcessFacts.of(pid).own_cpu_s


def family_cpu_s(pids: Collection[int]) -> dict[int, float]:
    """The CPU seconds that each of these processes and of their descendants has used."""
    there = processes()
    family = set(pids)
    # Descendants are found in several turns, because a child may have a lower number than its parent.
    while more := {pid for pid, facts in there.items() if facts.parent in family} - family:
        family |= more
    return {pid: there[pid].own_cpu_s + there[pid].ended_cpu_s for pid in family if pid in there}


def machine_cpu_s() -> float:
    """The CPU seconds that all cores of this machine have worked."""
    user, nice, system, _, _, irq, softirq, *_ = (
        Path("/proc/stat").read_text().split(maxsplit=9)[1:9]
    )
    return sum(map(int, (user, nice, system, irq, softirq))) / TICKS_PER_S
