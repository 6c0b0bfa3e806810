"""Measures a coordinator under load: latencies from the workers' side, CPU and memory.

CPU and memory are the kernel's figures. Latencies count only while `measuring` is set.
"""

import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from echo2d.core.capacity.estimators import quantile
from echo2d_lab.bench.cpu_seconds import cpu_s, machine_cpu_s

# The measured time is cut into parts. The spread of their figures shows how steady the load was.
PARTS = 5


def rss_mb(pid: int) -> float:
    """Return the resident memory of a process, in 10^6 bytes."""
    line = next(
        line
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("VmRSS")
    )
    return int(line.split()[1]) * 1024 / 1e6


@dataclass(frozen=True, slots=True)
class CpuUse:
    """CPU seconds of the coordinator, of this process (load) and of the whole machine.

    at: the moment, in seconds of the monotonic clock. `LoadMeter.share` and `shares` use the same
    type for shares of one core; then `at` is the measured time in seconds.
    """

    at: float
    coordinator: float
    load: float
    machine: float

    @staticmethod
    def now(pid: int) -> "CpuUse":
        return CpuUse(time.monotonic(), cpu_s(pid), cpu_s(os.getpid()), machine_cpu_s())


class LoadMeter:
    """See the module docstring. All times are in seconds."""

    def __init__(self) -> None:
        self.measuring = False
        self.lease_s: list[float] = []  # how long a slot stayed empty
        self.answer_s: list[float] = []  # until a result was acknowledged
        self.refused: Counter[str] = Counter()
        self.accepted = 0
        # Lost links also count while `measuring` is not set: no link should ever be lost.
        self.lost_links = 0
        self.uses: list[CpuUse] = []
        self._cuts: list[int] = []

    def filled(self, seconds: float) -> None:
        """Count a slot that was leased again `seconds` after a result had freed it."""
        if self.measuring:
            self.lease_s.append(seconds)

    def answered(self, seconds: float, *, refusal: str) -> None:
        """Count a result that was acknowledged, or refused (`refusal` is the reason)."""
        if self.measuring and refusal:
            self.refused[refusal] += 1
        elif self.measuring:
            self.accepted += 1
            self.answer_s.append(seconds)

    def cut(self, pid: int) -> None:
        """End a part here and begin the next."""
        self.uses.append(CpuUse.now(pid))
        self._cuts.append(len(self.lease_s))

    def parts_p99_s(self) -> list[float]:
        """Return the 99th percentile of `lease_s` in each part that has any."""
        parts = (
            self.lease_s[start:end] for start, end in zip(self._cuts, self._cuts[1:], strict=False)
        )
        return [found for part in parts if (found := quantile(part, 0.99)) is not None]

    def shares(self) -> Sequence[CpuUse]:
        """Return the shares of one core in each part."""
        return [
            _share(before, after) for before, after in zip(self.uses, self.uses[1:], strict=False)
        ]

    def share(self) -> CpuUse:
        """Return the shares of one core over all parts."""
        return _share(self.uses[0], self.uses[-1])


def _share(before: CpuUse, after: CpuUse) -> CpuUse:
    seconds = after.at - before.at
    parts = (
        after.coordinator - before.coordinator,
        after.load - before.load,
        after.machine - before.machine,
    )
    return CpuUse(seconds, *(part / seconds for part in parts))
