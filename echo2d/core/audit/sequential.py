"""Sequential tests: they look at one worker's trajectories one after another, for as long as it works.

Each is a CUSUM of log-likelihood ratios (Page, "Continuous inspection schemes", Biometrika 1954):
the sum rises with what a liar would send, falls with what an honest worker sends, and starts again
at 0, so a worker that begins to lie late is found as fast as one that always lied. The worker is
convicted when the sum reaches log(1 / ALPHA). By Lorden's inequality (Annals of Statistics 1971) an
honest worker is audited at least 1 / ALPHA times on average before that happens.

Not here: what is flagged (`baseline`), and when a worker is audited (`case`).
"""

import math
from dataclasses import dataclass

from echo2d.core.protocol.evidence import Evidence

ALPHA = 1e-6
THRESHOLD = -math.log(ALPHA)
# The largest share of flagged trajectories of an honest worker, and the share of a liar worth convicting.
FLAGS_HONEST = 0.005
FLAGS_LIAR = 0.1
# A liar worth convicting misses this many times as many seeds as the limit allows.
MISSES_LIAR = 4.0
# One trajectory adds at most this to a sum, so that no single one convicts.
TRAJECTORY_MAX = 4.0
# The ratios of this many audited answers are added up before they count: twice as many answers as a
# worker on trial holds.
BLOCK = 64

_FLAGGED = math.log(FLAGS_LIAR / FLAGS_HONEST)
_CLEAN = math.log((1 - FLAGS_LIAR) / (1 - FLAGS_HONEST))


@dataclass(slots=True)
class FlagTest:
    """Whether too many of a worker's trajectories are flagged.

    The likelihood ratio compares two Bernoulli distributions, with FLAGS_LIAR and FLAGS_HONEST.
    """

    sum: float = 0.0

    def add(self, *, flagged: bool) -> None:
        self.sum = max(0.0, self.sum + (_FLAGGED if flagged else _CLEAN))

    @property
    def convicts(self) -> bool:
        return self.sum >= THRESHOLD


@dataclass(slots=True)
class SeedTest:
    """Whether too many of a worker's tokens differ from those that their seeds give.

    The likelihood ratio compares two binomial distributions: a liar misses MISSES_LIAR times as often as
    the limit allows, an honest worker exactly as often as it allows.
    """

    sum: float = 0.0
    # Sums over all audited answers.
    misses: int = 0
    tokens: int = 0

    def add(self, misses: int, tokens: int, honest: float) -> None:
        """honest: the largest share of tokens that an honest worker misses; below 1 / MISSES_LIAR."""
        self.misses += misses
        self.tokens += tokens
        liar = MISSES_LIAR * honest
        ratio = misses * math.log(MISSES_LIAR)
        ratio += (tokens - misses) * math.log((1 - liar) / (1 - honest))
        self.sum = max(0.0, self.sum + min(TRAJECTORY_MAX, ratio))

    @property
    def convicts(self) -> bool:
        return self.sum >= THRESHOLD


@dataclass(slots=True)
class TemperTest:
    """Whether a worker's tokens are drawn too cold or too hot, or not at all.

    The ratios are `Evidence.cold` and `hot`. They are exact for any model and any length: over what an
    honest worker draws, e^ratio is 1 on average. But of the answers that run at the same time, the short
    ones arrive first, and short answers differ from long ones. So the test looks at the sum only after
    every BLOCK answers, which are more than run at a time: by then early and late answers even out.
    """

    cold: float = 0.0
    hot: float = 0.0
    block_cold: float = 0.0
    block_hot: float = 0.0
    answers: int = 0

    def add(self, found: Evidence) -> None:
        self.block_cold += min(TRAJECTORY_MAX, found.cold)
        self.block_hot += min(TRAJECTORY_MAX, found.hot)
        self.answers += 1
        if self.answers % BLOCK == 0:
            self.cold = max(0.0, self.cold + self.block_cold)
            self.hot = max(0.0, self.hot + self.block_hot)
            self.block_cold = self.block_hot = 0.0

    @property
    def convicts(self) -> bool:
        # The two tests share the error: each may be wrong with ALPHA / 2.
        return max(self.cold, self.hot) >= THRESHOLD + math.log(2)
