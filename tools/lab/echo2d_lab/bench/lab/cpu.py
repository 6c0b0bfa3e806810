"""Measures how much of this machine's cores a measurement used, and for what.

All nodes of a laboratory share the cores. If these are fully used, a figure shows the machine's limit and
not that of the measured program.
"""

import os
from dataclasses import dataclass, fields
from statistics import median
from time import monotonic
from typing import Self

from echo2d.demo.processes import Programs
from echo2d_lab.bench.cpu_seconds import family_cpu_s, machine_cpu_s
from echo2d_lab.bench.lab.netlab import Lab

# If more than this share of all cores is used, programs wait for each other.
BOUND = 0.8


@dataclass(frozen=True, slots=True)
class CpuShares:
    """Shares of all cores together, 0 to 1.

    programs: the measured programs and their child processes. everything: also processes that do not
    belong to the measurement.
    """

    emulator: float
    programs: float
    everything: float

    @property
    def is_bound(self) -> bool:
        return self.everything > BOUND

    @classmethod
    def of(cls, several: "list[CpuShares]") -> Self:
        """The medians of several shares."""
        names = [each.name for each in fields(cls)]
        return cls(**{name: median(getattr(each, name) for each in several) for name in names})

    def __str__(self) -> str:
        return (
            f"{self.everything:.0%} of all cores: emulator {self.emulator:.0%}, "
            f"programs {self.programs:.0%}{' (CPU-bound)' if self.is_bound else ''}"
        )


class CpuMeter:
    """Counts CPU time from its construction on."""

    def __init__(self, lab: Lab, programs: Programs) -> None:
        self._lab, self._programs = lab, programs
        self._at, self._emulator, self._all = monotonic(), lab.counts().cpu_s, machine_cpu_s()
        self._family = self._family_now()

    def shares(self) -> CpuShares:
        """The shares since the start. The CPU time of a program that was killed meanwhile is only in `everything`."""
        all_s = (monotonic() - self._at) * (os.cpu_count() or 1)
        used = (
            self._lab.counts().cpu_s - self._emulator,
            sum(now - self._family.get(pid, 0.0) for pid, now in self._family_now().items()),
            machine_cpu_s() - self._all,
        )
        return CpuShares(*(min(1.0, max(0.0, each) / all_s) for each in used))

    def _family_now(self) -> dict[int, float]:
        return family_cpu_s([program.pid for program in self._programs])
