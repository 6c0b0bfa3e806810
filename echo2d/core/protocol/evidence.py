"""What one forward pass shows about the tokens that one worker wrote.

    K       mean |log p - q|: p as the auditor computes it under the version that the span names, q
            as the worker reported it. K is high for made-up tokens with made-up logprobs, for
            another version and for other weights.
    Z       sum of (surprise - entropy), over the square root of the sum of their variances: about
            N(0, 1) if the tokens were drawn from p, whatever q says. Z is far from 0 if the tokens
            were chosen instead.
    cold    log likelihood ratio of drawing from p^COLD instead of p (rescaled to a distribution):
            positive if likely tokens come too often. hot: the same with HOT, for unlikely ones.
    misses  how many tokens are further from where their seed points than each of TOLERANCES. Many
            are if the tokens were drawn in another way.
    rerouted  the share of the experts reported for the tokens that the auditor's own layers did not
            choose; 1 for experts that no layer can choose.

Not here: the forward pass and the replay (an engine's `score`), and what follows from the evidence
(`audit/case`).
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

TokenNumbers = NDArray[np.float64]

# Multiples of the distance that an engine's replay allows: how precisely honest engines agree depends
# on the model and on the precision that they compute in.
TOLERANCES = (1.0, 2.5, 5.0)

# Exponents of the distributions that liars are compared with: temperatures of 2/3 and 3/2.
COLD, HOT = 1.5, 2 / 3


@dataclass(frozen=True, slots=True)
class Evidence:
    """The evidence about `tokens` tokens of one trajectory and one author; see the module docstring."""

    tokens: int
    k: float
    # The two sums of Z, which is excess / sqrt(variance).
    excess: float
    variance: float
    cold: float
    hot: float
    # One count for each of TOLERANCES; no count is higher than the one before it. None: the seed
    # was not replayed.
    misses: tuple[int, ...] | None
    rerouted: float = 0.0  # 0 too if no experts were reported

    @property
    def z(self) -> float:
        return self.excess / math.sqrt(self.variance) if self.variance > 0 else 0.0

    @property
    def missed(self) -> int | None:
        """How many tokens miss the narrowest tolerance."""
        return None if self.misses is None else self.misses[0]

    def plus(self, other: "Evidence") -> "Evidence":
        """The evidence of two pieces of one trajectory.

        If one piece was not replayed, the whole has no misses.
        """
        tokens = self.tokens + other.tokens
        return Evidence(
            tokens=tokens,
            k=(self.tokens * self.k + other.tokens * other.k) / tokens,
            excess=self.excess + other.excess,
            variance=self.variance + other.variance,
            cold=self.cold + other.cold,
            hot=self.hot + other.hot,
            misses=None
            if self.misses is None or other.misses is None
            else tuple(a + b for a, b in zip(self.misses, other.misses, strict=True)),
            rerouted=(self.tokens * self.rerouted + other.tokens * other.rerouted) / tokens,
        )


def evidence(
    logprobs: TokenNumbers,
    claimed: TokenNumbers,
    *,
    surprises: TokenNumbers,
    entropies: TokenNumbers,
    variances: TokenNumbers,
    colds: TokenNumbers,
    hots: TokenNumbers,
    distances: TokenNumbers | None,
    rerouted: float = 0.0,
) -> Evidence:
    """Sum up what is known about each token; all arrays are float64 [n], n >= 1.

    logprobs: log p. claimed: q. surprises, entropies, variances: of each token, under the distribution from
    which the tokens are drawn. colds, hots: each token's part of the ratios. distances: how far each token is
    from where its seed points, in tolerances of its engine; None: the seed was not replayed.
    """
    return Evidence(
        tokens=len(logprobs),
        k=float(np.abs(logprobs - claimed).mean()),
        excess=float((surprises - entropies).sum()),
        variance=float(variances.sum()),
        cold=float(colds.sum()),
        hot=float(hots.sum()),
        misses=None
        if distances is None
        else tuple(int((distances > each).sum()) for each in TOLERANCES),
        rerouted=rerouted,
    )
