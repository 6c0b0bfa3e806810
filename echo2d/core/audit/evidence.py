"""What one forward pass says about the tokens that one worker wrote.

    K       mean |log p - q|: p as the auditor computes it under the version that the span names, q
            as the worker reported it. Made-up tokens with made-up logprobs, another version and
            other weights show in it.
    Z       sum of (surprise - entropy), over the square root of the sum of their variances: about
            N(0, 1) if the tokens were drawn from p, whatever q says. Chosen tokens show in it.
    misses  tokens that do not lie where their seed points: u(seed, i) is further than TOLERANCE
            outside the token's part of the cumulated distribution. Another draw shows in it.

Not here: the forward pass (an engine's `score`), and what follows from it (`case`).
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# How far u may lie outside a token's part of [0, 1). Rounding moves the borders: see
# docs/security.md for how far, by engine.
TOLERANCE = 0.02

TokenNumbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Evidence:
    """About `tokens` tokens of one trajectory and one author; see the module docstring.

    excess, variance: the sums whose quotient is Z. misses: None: the seed was not replayed.
    """

    tokens: int
    k: float
    excess: float
    variance: float
    misses: int | None

    @property
    def z(self) -> float:
        return self.excess / math.sqrt(self.variance) if self.variance > 0 else 0.0


def evidence(
    logprobs: TokenNumbers,
    claimed: TokenNumbers,
    *,
    surprises: TokenNumbers,
    entropies: TokenNumbers,
    variances: TokenNumbers,
    outside: TokenNumbers | None,
) -> Evidence:
    """Sum up what is known of each token; all arrays are float64 [n], n >= 1.

    logprobs: log p. claimed: q. surprises, entropies, variances: of the distribution that is drawn
    from. outside: how far u lies outside the token's part; None: without replay.
    """
    return Evidence(
        tokens=len(logprobs),
        k=float(np.abs(logprobs - claimed).mean()),
        excess=float((surprises - entropies).sum()),
        variance=float(variances.sum()),
        misses=None if outside is None else int((outside > TOLERANCE).sum()),
    )


def outside(numbers: TokenNumbers, lows: TokenNumbers, highs: TokenNumbers) -> TokenNumbers:
    """How far each number lies outside [low, high): 0 inside."""
    distance: TokenNumbers = np.maximum(np.maximum(lows - numbers, numbers - highs), 0.0)
    return distance
