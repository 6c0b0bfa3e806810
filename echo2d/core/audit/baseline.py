"""Limits on what honest engines of one class give, learnt from workers that the operator trusts.

    trusted trajectories --> BASELINE_TRAJECTORIES of them --> limits: flags from now on

A trajectory is flagged if its K, or its share of rerouted experts, is above MARGIN times the largest of the
trusted trajectories. It is also flagged if it misses too many seeds: the chance of at least this many misses is
below RARE, if each token misses with MISSES_MARGIN times the share that the trusted trajectories missed. The
tolerance is the narrowest one within which the trusted trajectories agree with the auditor. The limits on K and on
rerouted experts are looser for short answers, because a mean over few tokens varies more by chance. Before the
baseline is whole nothing is flagged, and no worker is convicted.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from echo2d.core.protocol.evidence import TOLERANCES, Evidence

BASELINE_TRAJECTORIES = 200
MARGIN = 3.0
MISSES_MARGIN = 1.5
# This limit holds without replay. At most one honest answer in a thousand is this much likelier under
# another temperature, because e^ratio is 1 on average.
RATIO_MAX = math.log(1000)
# A class whose trusted workers agree exactly still needs room: another honest worker may compute in
# bfloat16 (figures: docs/reference/security.md).
K_MIN = 0.08
MISSES_MIN = 1e-4
REROUTED_MIN = 0.05
# The limit on K is meant for long answers. An answer of n tokens may differ in total by as much as an
# answer of n + SHORT_TOKENS tokens whose K is at the limit.
SHORT_TOKENS = 4
RARE = 0.02


@dataclass(frozen=True, slots=True)
class HonestLimits:
    """Upper limits for an honest engine of one class."""

    # K of a long answer.
    k: float
    # The share of tokens that miss their seed in the long run, at the tolerance TOLERANCES[tolerance].
    misses: float
    tolerance: int
    # The share of the reported experts that the auditor's layers did not choose.
    rerouted: float

    @property
    def exact(self) -> bool:
        """Whether trusted workers computed exactly as the auditor does; other precisions may exceed the limits."""
        return self.k == K_MIN and not self.tolerance

    def missed(self, found: Evidence) -> int:
        return 0 if found.misses is None else found.misses[self.tolerance]

    def flags(self, found: Evidence) -> tuple[str, ...]:
        """The reasons why this trajectory is flagged: "logprobs", "experts", and "seed" (without replay "draw")."""
        reasons = {
            "logprobs": _long_k(found) > self.k,
            "experts": _long_rerouted(found) > self.rerouted,
            "seed": chance_of(self.missed(found), found.tokens, self.misses) < RARE,
            "draw": found.misses is None and max(found.cold, found.hot) > RATIO_MAX,
        }
        return tuple(name for name, wrong in reasons.items() if wrong)


@dataclass(slots=True)
class Baseline:
    """The baseline of one class; see the module docstring."""

    trusted: list[Evidence] = field(default_factory=list)
    limits: HonestLimits | None = None

    @property
    def learnt(self) -> float:
        """The share of the BASELINE_TRAJECTORIES that has arrived; 1.0: limits are learnt."""
        if self.limits is not None:
            return 1.0
        return len(self.trusted) / BASELINE_TRAJECTORIES

    def add(self, found: Evidence) -> None:
        """Add a trajectory of a trusted worker; once limits are learnt, it changes nothing."""
        if self.limits is None:
            self.trusted.append(found)
            if len(self.trusted) >= BASELINE_TRAJECTORIES:
                self.limits = limits_of(self.trusted)
                self.trusted = []


# Limits for runs without a trusted worker: no honest engine exceeds them in any precision.
GROSS = HonestLimits(k=1.0, misses=0.1, tolerance=len(TOLERANCES) - 1, rerouted=0.5)


def limits_of(trusted: Sequence[Evidence]) -> HonestLimits:
    """The limits that follow from these trajectories, of which there are at least two.

    No limit is above GROSS, so that one broken answer of a trusted worker does not make the audit
    blind.
    """
    tokens = sum(each.tokens for each in trusted)
    missed = [
        sum(each.misses[at] for each in trusted if each.misses is not None)
        for at in range(len(TOLERANCES))
    ]
    # A tolerance is too narrow if trusted workers miss more than 0.2 % of the tokens with it.
    agreed = (at for at, misses in enumerate(missed) if misses <= 0.002 * tokens)
    tolerance = next(agreed, GROSS.tolerance)
    # Two misses are added, because few tokens say little about rare misses.
    share = (missed[tolerance] + 2) / tokens
    return HonestLimits(
        min(GROSS.k, max(K_MIN, MARGIN * max(map(_long_k, trusted)))),
        min(GROSS.misses, max(MISSES_MIN, MISSES_MARGIN * share)),
        tolerance,
        min(GROSS.rerouted, max(REROUTED_MIN, MARGIN * max(map(_long_rerouted, trusted)))),
    )


def _long_rerouted(found: Evidence) -> float:
    """The share to compare with the limit for long answers: that of a short answer is reduced."""
    return found.rerouted * found.tokens / (found.tokens + SHORT_TOKENS)


def _long_k(found: Evidence) -> float:
    """The K to compare with the limit for long answers: the K of a short answer is reduced."""
    return found.k * found.tokens / (found.tokens + SHORT_TOKENS)


def chance_of(misses: int, tokens: int, share: float) -> float:
    """The chance of at least this many misses, if each token misses independently with the chance `share`, in (0, 1).

    It is the upper tail of a binomial distribution, and 1 if there are no more misses than expected.
    """
    if misses <= tokens * share:
        return 1.0
    ways = math.lgamma(tokens + 1) - math.lgamma(misses + 1) - math.lgamma(tokens - misses + 1)
    term = math.exp(ways + misses * math.log(share) + (tokens - misses) * math.log1p(-share))
    total, odds = 0.0, share / (1 - share)
    for more in range(misses, tokens + 1):
        total += term
        term *= odds * (tokens - more) / (more + 1)
        if term <= 1e-9 * total:
            break
    return min(1.0, total)
