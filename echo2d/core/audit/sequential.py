"""Tests that look at one worker's trajectories one after another, and never forget to doubt.

Each is a CUSUM of log-likelihood ratios (Page, "Continuous inspection schemes", Biometrika 1954):
the sum rises with what a liar would send, falls with what an honest worker sends, and starts again
at 0, so a worker that begins to lie late is found as fast as one that always lied. The worker is
convicted when the sum reaches log(1 / ALPHA). By Lorden's inequality (Annals of Statistics 1971) an
honest worker is audited 1 / ALPHA times on average before that happens, at least.

Not here: what is flagged (`baseline`), and who is audited when (`case`).
"""

import math
from dataclasses import dataclass, field

ALPHA = 1e-6
THRESHOLD = -math.log(ALPHA)
# Share of flagged trajectories: of an honest worker at most, and of one that is worth convicting.
FLAGS_HONEST = 0.005
FLAGS_LIAR = 0.1
# Shift of Z per trajectory for which its test is made, in standard deviations.
Z_SHIFT = 0.4
# One trajectory counts as no further off than this: short answers have no normal distribution.
Z_MAX = 4.0

_FLAGGED = math.log(FLAGS_LIAR / FLAGS_HONEST)
_CLEAN = math.log((1 - FLAGS_LIAR) / (1 - FLAGS_HONEST))


@dataclass(slots=True)
class FlagTest:
    """Whether too many of a worker's trajectories are flagged.

    The ratio is that of two Bernoulli distributions, with FLAGS_LIAR and FLAGS_HONEST.
    """

    sum: float = 0.0

    def add(self, *, flagged: bool) -> None:
        self.sum = max(0.0, self.sum + (_FLAGGED if flagged else _CLEAN))

    @property
    def convicts(self) -> bool:
        return self.sum >= THRESHOLD


@dataclass(slots=True)
class ShiftTest:
    """Whether a worker's Z lies too high or too low on the whole, two-sided.

    The ratio is that of N(+-Z_SHIFT, 1) and N(0, 1).
    """

    sums: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def add(self, z: float) -> None:
        """z: standardised by the baseline of the worker's engine class."""
        assert math.isfinite(z)
        z = min(Z_MAX, max(-Z_MAX, z))
        for side, sign in enumerate((1.0, -1.0)):
            step = Z_SHIFT * (sign * z - Z_SHIFT / 2)
            self.sums[side] = max(0.0, self.sums[side] + step)

    @property
    def convicts(self) -> bool:
        # Two tests share the error.
        return max(self.sums) >= THRESHOLD + math.log(2)
