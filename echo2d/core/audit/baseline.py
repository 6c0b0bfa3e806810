"""What honest engines of one class look like, learnt from workers that the operator trusts.

    trusted trajectories --> BASELINE_TRAJECTORIES of them --> limits: flags from now on

A trajectory is flagged if its K, or its share of missed seeds, is beyond MARGIN times the largest of
the trusted ones. Without a whole baseline nothing is flagged, and nobody
is convicted.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from echo2d.core.audit.evidence import Evidence
from echo2d.core.audit.sequential import Z_MAX

BASELINE_TRAJECTORIES = 200
MARGIN = 3.0
# Rounding alone; a class whose trusted workers agree exactly still needs room.
K_MIN = 1e-4
MISSES_MIN = 0.005


@dataclass(frozen=True, slots=True)
class HonestLimits:
    """k, misses: beyond these a trajectory is flagged; misses as a share of its tokens. z_mean,
    z_sd: of trusted trajectories.
    """

    k: float
    misses: float
    z_mean: float
    z_sd: float

    def flags(self, found: Evidence) -> tuple[str, ...]:
        """Why this trajectory is flagged: "logprobs", "seed", both or neither."""
        missed = 0.0 if found.misses is None else found.misses / found.tokens
        reasons = {"logprobs": found.k > self.k, "seed": missed > self.misses}
        return tuple(name for name, wrong in reasons.items() if wrong)

    def z(self, found: Evidence) -> float:
        """The trajectory's Z in standard deviations from that of trusted ones."""
        return (found.z - self.z_mean) / self.z_sd


@dataclass(slots=True)
class Baseline:
    """Of one engine class; see the module docstring."""

    trusted: list[Evidence] = field(default_factory=list)
    limits: HonestLimits | None = None

    def add(self, found: Evidence) -> None:
        """A trajectory of a trusted worker; after the last one that is needed nothing changes."""
        if self.limits is None:
            self.trusted.append(found)
            if len(self.trusted) >= BASELINE_TRAJECTORIES:
                self.limits = limits_of(self.trusted)
                self.trusted = []


def limits_of(trusted: Sequence[Evidence]) -> HonestLimits:
    """The limits that these trajectories give; at least two."""
    ks = [each.k for each in trusted]
    missed = [0.0 if each.misses is None else each.misses / each.tokens for each in trusted]
    zs = [min(Z_MAX, max(-Z_MAX, each.z)) for each in trusted]
    mean = sum(zs) / len(zs)
    sd = math.sqrt(sum((z - mean) ** 2 for z in zs) / (len(zs) - 1))
    return HonestLimits(
        max(K_MIN, MARGIN * max(ks)),
        max(MISSES_MIN, MARGIN * max(missed)),
        mean,
        max(sd, 0.1),
    )
