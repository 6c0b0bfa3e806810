"""What honest engines of one class look like, learnt from workers that the operator trusts.

    trusted trajectories --> BASELINE_TRAJECTORIES of them --> limits: flags from now on

A trajectory is flagged if its K is beyond MARGIN times the largest of the trusted ones, or if so many
missed seeds have a chance below RARE at MISSES_MARGIN times the share that trusted ones missed. The
tolerance is the narrowest within which these agree. Short answers have more room: of few tokens a
mean is far off by chance. Without a whole baseline nothing is flagged, and nobody is convicted.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from echo2d.core.protocol.evidence import TOLERANCES, Evidence

BASELINE_TRAJECTORIES = 200
MARGIN = 3.0
MISSES_MARGIN = 1.5
# Without replay: an honest answer is that much likelier under another temperature once in a thousand
# times at most, for e^ratio is 1 on average.
RATIO_MAX = math.log(1000)
# A class whose trusted workers agree exactly still needs room: another honest worker may compute in
# bfloat16, which docs/reference/security.md has the figures of.
K_MIN = 0.08
MISSES_MIN = 1e-4
# The limit on K is for long answers. One of n tokens may differ by as much in all as one of n +
# SHORT_TOKENS at that limit.
SHORT_TOKENS = 4
RARE = 0.02


@dataclass(frozen=True, slots=True)
class HonestLimits:
    """k: of a long answer at most. misses: share of tokens that may miss in the long run, within
    TOLERANCES[tolerance].
    """

    k: float
    misses: float
    tolerance: int

    @property
    def exact(self) -> bool:
        """Whether trusted workers computed as the auditor does. Another precision may lie outside."""
        return self.k == K_MIN and not self.tolerance

    def missed(self, found: Evidence) -> int:
        return 0 if found.misses is None else found.misses[self.tolerance]

    def flags(self, found: Evidence) -> tuple[str, ...]:
        """Why this trajectory is flagged: "logprobs", and "seed", or "draw" without replay."""
        reasons = {
            "logprobs": _long_k(found) > self.k,
            "seed": chance_of(self.missed(found), found.tokens, self.misses) < RARE,
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
        """The share of the BASELINE_TRAJECTORIES that is there; 1.0: limits are learnt."""
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
GROSS = HonestLimits(k=1.0, misses=0.1, tolerance=len(TOLERANCES) - 1)


def limits_of(trusted: Sequence[Evidence]) -> HonestLimits:
    """The limits that these trajectories give; at least two.

    One broken answer of a trusted worker must not make the audit blind, so nothing beyond GROSS is
    allowed.
    """
    tokens = sum(each.tokens for each in trusted)
    missed = [
        sum(each.misses[at] for each in trusted if each.misses is not None)
        for at in range(len(TOLERANCES))
    ]
    # A tolerance is too narrow if trusted workers miss more than 0.2 % of the tokens.
    agreed = (at for at, misses in enumerate(missed) if misses <= 0.002 * tokens)
    tolerance = next(agreed, GROSS.tolerance)
    # Two more than there were, because few tokens say little about rare misses.
    share = (missed[tolerance] + 2) / tokens
    return HonestLimits(
        min(GROSS.k, max(K_MIN, MARGIN * max(map(_long_k, trusted)))),
        min(GROSS.misses, max(MISSES_MIN, MISSES_MARGIN * share)),
        tolerance,
    )


def _long_k(found: Evidence) -> float:
    """What a long answer may show where this one shows its K."""
    return found.k * found.tokens / (found.tokens + SHORT_TOKENS)


def chance_of(misses: int, tokens: int, share: float) -> float:
    """The chance of at least so many misses, if each token misses by itself with this chance.

    1 if they are no more than expected. share: in (0, 1). The upper tail of a binomial distribution.
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
