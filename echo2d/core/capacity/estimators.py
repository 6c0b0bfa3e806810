"""Estimators that turn a run's events into figures, each with its uncertainty.

    T_train       `Smoothed`     a train step, net of waiting
    T_bcast       `Tail`         the 95th percentile, because the learner waits for late workers
    g             `RecentMean`   a trajectory, from its lease to its acceptance
    lengths       `Lengths`      seconds of each sample / usual seconds of its worker; added group by group
    refit pause   `Smoothed`
    recompute     `Smoothed`     KV caches that a refit dropped, computed again
    mu_i          `WorkerRate`   accepted fresh trajectories/s of a worker with all slots leased
    discards      `Share`        the share of trajectories that were never trained on
    yield         `Yields`       the share of a worker's trajectories that were worth training on
    bytes         `Smoothed`     bytes of a version on the wire

A `Smoothed` bounds every sample to three usual deviations, so that a single outlier hardly moves
it. If AGREEING samples in a row are all that far off on the same side, the value has changed, and
the average follows them at once. A `Tail` depends on the order of samples, not on their size. mu_i counts leased
slot-seconds, so a worker that waits because of admission does not look slow.

Not here: who reports the samples (`measurements`), and what follows from the figures. Prices are
not measured; the operator states them.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import fmean, median, pstdev

_MEMORY = 8  # a new sample moves a `Smoothed` by one eighth of its distance
AGREEING = 4  # far-off samples in a row that are a change, and no outliers
PRIOR_TRAJECTORIES = 4.0  # a newcomer's prior weighs as much as this many trajectories of its own
LENGTHS_ANEW = 64  # samples after which the newest lengths replace those in use


def quantile(values: Iterable[float], share: float) -> float | None:
    """The smallest value that at least `share` of all values do not exceed; None without values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None


@dataclass(frozen=True, slots=True)
class Estimate:
    """An estimated value."""

    value: float
    # The standard error; infinite while there is one sample only.
    sd: float
    # How many samples, or trajectories, the value is made from.
    samples: float


@dataclass(slots=True)
class Smoothed:
    """A moving average that outliers hardly move."""

    value: float | None = None
    # The usual distance of a sample from the average.
    deviation: float = 0.0
    samples: int = 0
    _newest: deque[float] = field(default_factory=lambda: deque(maxlen=AGREEING))

    def add(self, sample: float) -> None:
        """Count a finite sample.

        The value is the median of the newest AGREEING samples in two cases: while there are no other
        samples, and when all of these are far off on the same side.
        """
        assert math.isfinite(sample)
        self.samples += 1
        self._newest.append(sample)
        if self.value is None or self.samples <= AGREEING:
            self._restart()
            return
        off = [one - self.value for one in self._newest]
        # A sample counts as at most three usual deviations off.
        reach = 3.0 * max(self.deviation, 0.01 * abs(self.value), 1e-9)
        if min(off) > reach or max(off) < -reach:
            self._restart()
            return
        bounded = max(-reach, min(reach, off[-1]))
        self.value += bounded / _MEMORY
        self.deviation += (abs(bounded) - self.deviation) / _MEMORY

    def _restart(self) -> None:
        self.value = middle = median(self._newest)
        self.deviation = median(abs(one - middle) for one in self._newest)

    @property
    def estimate(self) -> Estimate | None:
        """The average; None without samples."""
        if self.value is None:
            return None
        # A moving average with weight 1/n varies like a mean of 2n - 1 samples. The factor of 1.25
        # turns the mean absolute deviation of a normal distribution into a standard deviation.
        independent = min(self.samples, 2 * _MEMORY - 1)
        sd = 1.25 * self.deviation / math.sqrt(independent) if self.samples > 1 else math.inf
        return Estimate(self.value, sd, self.samples)


@dataclass(slots=True)
class Tail:
    """The 95th percentile of the newest samples; its distance from the 80th serves as the sd."""

    # The 95th percentile of 32 samples is the second largest.
    samples: deque[float] = field(default_factory=lambda: deque(maxlen=32))

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
class RecentMean:
    """The mean of the newest samples."""

    # With a long tail (sigma = 1) the mean of 128 samples is off by an eighth.
    samples: deque[float] = field(default_factory=lambda: deque(maxlen=128))

    def add(self, sample: float) -> None:
        assert math.isfinite(sample)
        self.samples.append(sample)

    @property
    def estimate(self) -> Estimate | None:
        count = len(self.samples)
        if not count:
            return None
        mean = fmean(self.samples)
        sd = math.dist(self.samples, [mean] * count) / count if count > 1 else math.inf
        return Estimate(mean, sd, count)


@dataclass(slots=True)
class Lengths:
    """The lengths of the newest samples, group after group."""

    # These stay the same for LENGTHS_ANEW samples, so that what follows from them need not be computed again; empty
    # until enough are known.
    newest: tuple[float, ...] = ()
    samples: int = 0
    _samples: deque[float] = field(default_factory=lambda: deque(maxlen=1024))

    @property
    def sigma(self) -> float | None:
        """The standard deviation of their logarithms; None until enough are known."""
        logs = [math.log(each) for each in self.newest if each > 0]
        return pstdev(logs) if logs else None

    def add(self, group: Iterable[float]) -> None:
        """The samples of one group ended with these lengths, or had them when the group went on without them."""
        before, known = self.samples // LENGTHS_ANEW, len(self._samples)
        for length in group:
            assert 0 <= length < math.inf
            self._samples.append(length)
            self.samples += 1
        # Before 128 samples are known, the assumed lengths hold.
        if self.samples // LENGTHS_ANEW > before and known >= 128 and any(self._samples):
            self.newest = tuple(self._samples)


@dataclass(slots=True)
class Share:
    """The share of trajectories that were thrown away; the prior is one in a hundred."""

    made: float = 1.0
    thrown: float = 0.01
    samples: int = 0

    def add(self, kept: int, thrown: int, *, memory: float = 4096.0) -> None:
        """Count new trajectories; after `memory` of them, older ones keep 1/e of their weight."""
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
    """mu_i of one worker."""

    # Trajectories/s expected before any work, with all slots leased.
    prior: float
    group_size: int
    # Work keeps 1/e of its weight after this many leased seconds.
    memory_s: float
    # The remembered work, in trajectories and seconds.
    made: float = 0.0
    leased_s: float = 0.0  # with all slots leased; with half of them, half as much
    samples: float = 0.0

    def __post_init__(self) -> None:
        assert self.prior > 0
        assert self.memory_s > 0 < self.group_size

    def add(self, accepted: float, leased_s: float) -> None:
        """Count trajectories that were accepted within this many leased seconds.

        A second in which half of the slots were leased counts as half a second.
        """
        assert accepted >= 0 <= leased_s
        keep = math.exp(-leased_s / self.memory_s)
        # A rate of 1,000 times the prior is an error of a clock.
        self.made = self.made * keep + min(accepted, 1e3 * self.prior * leased_s)
        self.leased_s = self.leased_s * keep + leased_s
        self.samples += accepted

    def follow(self, change: float) -> None:
        """Circumstances have changed: the worker now makes `change` times as much as before."""
        assert change > 0
        self.prior *= change
        self.leased_s /= change

    @property
    def value(self) -> float:
        """Trajectories/s, from the prior and the remembered work: the more work, the less the prior counts."""
        return (self.made + PRIOR_TRAJECTORIES) / (self.leased_s + PRIOR_TRAJECTORIES / self.prior)

    @property
    def estimate(self) -> Estimate:
        """The value with its uncertainty."""
        # Results arrive in groups, so n of them vary like n / group_size independent ones.
        independent = max(1.0, (self.made + PRIOR_TRAJECTORIES) / self.group_size)
        return Estimate(self.value, self.value / math.sqrt(independent), self.samples)
