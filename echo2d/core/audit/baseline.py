"""What honest engines of one class look like, learnt from workers that the operator trusts.

    trusted trajectories --> BASELINE_TRAJECTORIES of them --> limits: flags from now on

A trajectory is flagged if its K, or its share of missed seeds, is beyond MARGIN times the largest of
the trusted ones. Without a whole baseline nothing is flagged, and nobody
is convicted.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from echo2d.core.protocol.evidence import Evidence

BASELINE_TRAJECTORIES = 200
MARGIN = 3.0
# Without replay: an honest answer is that much likelier under another temperature once in a thousand
# times at most, for e^ratio is 1 on average.
RATIO_MAX = math.log(1000)
# A class whose trusted workers agree exactly still needs room: another honest worker may compute in
# bfloat16, which docs/security.md has the figures of.
K_MIN = 0.1
MISSES_MIN = 0.05


@dataclass(frozen=True, slots=True)
class HonestLimits:
    """k, misses: beyond these a trajectory is flagged; misses as a share of its tokens."""

    k: float
    misses: float

    def flags(self, found: Evidence) -> tuple[str, ...]:
        """Why this trajectory is flagged: "logprobs", and "seed", or "draw" without replay."""
        missed = 0.0 if found.misses is None else found.misses / found.tokens
        reasons = {
            "logprobs": found.k > self.k,
            "seed": missed > self.misses,
            "draw": found.misses is None and max(found.cold, found.hot) > RATIO_MAX,
        }
        return tuple(name for name, wrong in reasons.items() if wrong)


@dataclass(slots=True)
class Baseline:
    """Of one engine class; see the module docstring."""

    trusted: list[Evidence] = field(default_factory=list)
    limits: HonestLimits | None = None

    @property
    def learnt(self) -> float:
        """Of the trajectories that limits are made of, the share that is there."""
        if self.limits is not None:
            return 1.0
        return len(self.trusted) / BASELINE_TRAJECTORIES

    def add(self, found: Evidence) -> None:
        """A trajectory of a trusted worker; after the last one that is needed nothing changes."""
        if self.limits is None:
            self.trusted.append(found)
            if len(self.trusted) >= BASELINE_TRAJECTORIES:
                self.limits = limits_of(self.trusted)
                self.trusted = []


# Beyond these no engine is honest, whatever it computes in: for runs that trust nobody.
GROSS = HonestLimits(k=1.0, misses=0.5)


def limits_of(trusted: Sequence[Evidence]) -> HonestLimits:
    """The limits that these trajectories give; at least two.

    One broken answer of a trusted worker must not make the audit blind, so nothing beyond GROSS is
    allowed.
    """
    ks = [each.k for each in trusted]
    missed = [0.0 if each.misses is None else each.misses / each.tokens for each in trusted]
    return HonestLimits(
        min(GROSS.k, max(K_MIN, MARGIN * max(ks))),
        min(GROSS.misses, max(MISSES_MIN, MARGIN * max(missed))),
    )
