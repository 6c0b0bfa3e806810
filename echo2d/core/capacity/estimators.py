"""From what happened to the numbers that capacity and activation need, each with how uncertain it is.

    T_train       `Smoothed`     of the steps' times net of waiting
    T_bcast       `Tail`         the 95th percentile of the newest: a worker that comes late makes the learner wait
    refit pause   `Smoothed`
    mu_i          `WorkerRate`   accepted fresh trajectories/s of one worker with all its slots leased
    discards      `Share`        of trajectories that were made and not trained on
    bytes         `Smoothed`     on the wire, of a version

Outliers: in a `Smoothed` a sample counts as no further off than OUTLIER usual deviations, so that one of a thousand
times the rest hardly moves it; AGREEING in a row on one side are a change, and followed at once. A `Tail` takes the
order, not the size. mu_i counts leased slot-seconds: a worker that admission keeps waiting is not slow.

A newcomer has the prior's rate, worth PRIOR_TRAJECTORIES of its own. Results come by the group, so a count of n varies
as n / group_size independent ones do. Everything is forgotten with MEMORY samples, or `memory_s` of leased time.
Not here: who reports these, and what follows from them. Prices are not measured: the operator states them.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

MEMORY = 8  # samples that count in a `Smoothed`: an eighth each
AGREEING = 4  # samples in a row that are no outliers, but a change
OUTLIER = 3.0  # usual deviations that one sample may move the estimate's target
TAIL_SAMPLES = 32  # of which the 95th percentile is taken: the second largest
PRIOR_TRAJECTORIES = 4.0  # what is said of a newcomer beforehand counts as so many that it made
RATE_FACTOR_MAX = 1e3  # a rate so many times the prior is a clock's mistake


def quantile(values: Iterable[float], share: float) -> float | None:
    """The smallest value that at least `share` of all values do not exceed; None without values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None


@dataclass(frozen=True, slots=True)
class Estimate:
    """sd: standard error of the value; infinite while it is only a guess. samples: it is made of."""

    value: float
    sd: float
    samples: int


@dataclass(slots=True)
class Smoothed:
    """A moving average that outliers hardly move. deviation: the usual distance of a sample from it."""

    value: float | None = None
    deviation: float = 0.0
    samples: int = 0
    _newest: deque[float] = field(default_factory=lambda: deque(maxlen=AGREEING))

    def add(self, sample: float) -> None:
        """The first few samples count by their median, as do some in a row that are all far off on the same side."""
        assert math.isfinite(sample)
        self.samples += 1
        self._newest.append(sample)
        if self.value is None or self.samples <= AGREEING:
            self._restart()
            return
        off = [one - self.value for one in self._newest]
        reach = OUTLIER * max(self.deviation, 0.01 * abs(self.value), 1e-9)
        if min(off) > reach or max(off) < -reach:
            self._restart()
            return
        bounded = max(-reach, min(reach, off[-1]))
        self.value += bounded / MEMORY
        self.deviation += (abs(bounded) - self.deviation) / MEMORY

    def _restart(self) -> None:
        self.value = middle = median(self._newest)
        self.deviation = median(abs(one - middle) for one in self._newest)

    @property
    def estimate(self) -> Estimate | None:
        if self.value is None:
            return None
        independent = min(self.samples, 2 * MEMORY - 1)
        sd = 1.25 * self.deviation / math.sqrt(independent) if self.samples > 1 else math.inf
        return Estimate(self.value, sd, self.samples)


@dataclass(slots=True)
class Tail:
    """The 95th percentile of the newest samples; its sd by the spread between neighbours in their order."""

    samples: deque[float] = field(default_factory=lambda: deque(maxlen=TAIL_SAMPLES))

    def add(self, sample: float) -> None:
        assert math.isfinite(sample)
        self.samples.append(sample)

    @property
    def estimate(self) -> Estimate | None:
        high, usual = quantile(self.samples, 0.95), quantile(self.samples, 0.8)
        if high is None or usual is None:
            return None
        return Estimate(
            high, (high - usual) if len(self.samples) > 1 else math.inf, len(self.samples)
        )


@dataclass(slots=True)
class Share:
    """How many of those that were made were thrown away. The prior is one in a hundred."""

    made: float = 1.0
    thrown: float = 0.01
    samples: int = 0

    def add(self, kept: int, thrown: int, *, memory: float = 4096.0) -> None:
        assert kept >= 0 <= thrown
        keep = math.exp(-(kept + thrown) / memory)
        self.made = self.made * keep + kept + thrown
        self.thrown = self.thrown * keep + thrown
        self.samples += kept + thrown

    @property
    def estimate(self) -> Estimate:
        share = self.thrown / self.made
        return Estimate(share, math.sqrt(share * (1 - share) / (1 + self.made)), self.samples)


@dataclass(slots=True)
class WorkerRate:
    """mu_i of one worker. prior: trajectories/s with all slots. made, leased_s: what is remembered."""

    prior: float
    group_size: int
    memory_s: float
    made: float = 0.0
    leased_s: float = 0.0  # with all slots leased; with half of them, half as much
    samples: int = 0

    def __post_init__(self) -> None:
        assert self.prior > 0
        assert self.memory_s > 0 < self.group_size

    def add(self, accepted: int, leased_s: float) -> None:
        """So many were accepted while its slots were leased for so long, each slot counting for its share."""
        assert accepted >= 0 <= leased_s
        keep = math.exp(-leased_s / self.memory_s)
        self.made = self.made * keep + min(accepted, RATE_FACTOR_MAX * self.prior * leased_s)
        self.leased_s = self.leased_s * keep + leased_s
        self.samples += accepted

    def follow(self, change: float) -> None:
        """What is known of it was known of other circumstances, under which it made so many times less."""
        assert change > 0
        self.prior *= change
        self.leased_s /= change

    @property
    def value(self) -> float:
        return (self.made + PRIOR_TRAJECTORIES) / (self.leased_s + PRIOR_TRAJECTORIES / self.prior)

    @property
    def estimate(self) -> Estimate:
        independent = max(1.0, (self.made + PRIOR_TRAJECTORIES) / self.group_size)
        return Estimate(self.value, self.value / math.sqrt(independent), self.samples)
