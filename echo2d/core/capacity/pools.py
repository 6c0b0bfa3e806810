"""Prices pools: what a train step costs with the cheapest workers, and how many of them make it cheapest.

    usd a step(pool) = (usd/h of the learner + usd/h of the pool) * seconds a step(pool) / 3600

A pool is the first n workers by rho. With a small pool the learner waits, and a waiting learner still costs its price;
a large pool costs more than the waiting that it saves. So neither "no bubble" nor mu_min is the aim: where S leaves
hardly any time, half of mu_min may be cheapest. `pipeline` plays some pools; for the others the seconds are
interpolated over mu. A learner without a price is assumed to cost LEARNER_USD_PER_H.
Not here: which set of workers makes the throughput (`worker_cost`), and when the set changes (`activation`).
"""

import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

from echo2d.core.capacity.model import Demand
from echo2d.core.capacity.pipeline import Pipeline, group_times
from echo2d.core.capacity.worker_cost import COST_SLACK, WorkerOffer

# The price of a learner for which none is stated: that of a host with a few rented GPUs.
LEARNER_USD_PER_H = 10.0
# The first pools that are played are each PLAYED_TIMES as large as the one before; then up to PLAYED_MORE pools near
# the cheapest one are played.
PLAYED_TIMES, PLAYED_MORE = 1.25, 6
# If two pools differ in cost by no more than this share, the smaller one is better.
SAME = 0.002
# Two pools are named beside the cheapest: with its throughput times this factor, and divided by it.
BESIDE = 1.1


@dataclass(frozen=True, slots=True)
class PricedPool:
    """The pool of the first `workers` workers."""

    workers: int
    mu: float  # trajectories/s
    usd_per_h: float
    step_s: float
    usd_per_step: float


class StepTimes:
    """Seconds a step as a function of mu, found by playing some pools of these workers."""

    def __init__(self, demand: Demand, ranked: Sequence[WorkerOffer]) -> None:
        self.demand, self._ranked = demand, ranked
        self._mu = list(accumulate((each.mu for each in ranked), initial=0.0))
        self._played: set[int] = set()
        # The logarithms of mu and of the seconds.
        self._curve: list[tuple[float, float]] = []

    def step_s(self, mu: float) -> float:
        """Seconds between two commits with workers that make this much together; infinite with none."""
        return self.steps_s([mu])[0]

    def steps_s(self, makes: Sequence[float]) -> list[float]:
        """The same for several pools, in ascending order of what they make."""
        found, place, curve = [], 0, self._curve
        for mu in makes:
            if mu <= 0 or not curve:
                found.append(math.inf)
                continue
            at = math.log(mu)
            while place < len(curve) and curve[place][0] < at:
                place += 1
            if place == len(curve):
                seconds = curve[-1][1]
            else:
                high_mu, high_s = curve[place]
                # Below the smallest pool that was played, half the throughput makes a step twice as long.
                low_mu, low_s = curve[place - 1] if place else (high_mu - 1.0, high_s + 1.0)
                seconds = low_s + (high_s - low_s) * (at - low_mu) / (high_mu - low_mu)
            found.append(math.exp(seconds))
        return found

    def play(self, workers: int) -> bool:
        """Play the pool of the first `workers` workers; False if it has been played."""
        if workers in self._played:
            return False
        self._played.add(workers)
        slots = [each.sample_s for each in self._ranked[:workers] for _ in range(each.slots)]
        step_s = Pipeline(self.demand, slots).step_s()
        if step_s < math.inf:
            insort(self._curve, (math.log(self._mu[workers]), math.log(step_s)))
        return True

    def play_near(self, workers: int) -> int:
        """Play this pool or, if it has been played, the one in the middle of the wider gap beside it. Returns which."""
        if not workers or self.play(workers):
            return workers
        lower = max((each for each in self._played if each < workers), default=workers)
        upper = min((each for each in self._played if each > workers), default=workers)
        gaps = (workers - lower) / workers, (upper - workers) / upper
        middle = (workers + lower) // 2 if gaps[0] >= gaps[1] else (workers + upper + 1) // 2
        # In a gap of at most 2 % of the workers, no pool is played.
        if max(gaps) > 0.02:
            self.play(middle)
        return middle

    def first(self, mu: float) -> int:
        """How many workers together make the throughput `mu`; all workers, if together they make less."""
        return min(bisect_left(self._mu, mu * (1 - COST_SLACK), lo=1), len(self._ranked))

    def holds_for(self, demand: Demand, ranked: Sequence[WorkerOffer]) -> bool:
        """Whether a new curve for this demand and these workers would hardly differ from this one."""
        mine, other = self._signature(self.demand, self._ranked), self._signature(demand, ranked)
        # A curve holds for demands whose figures differ from its own by at most 10 %.
        return all(
            abs(a - b) <= 0.1 * max(abs(a), abs(b)) for a, b in zip(mine, other, strict=True)
        )

    def _signature(self, demand: Demand, ranked: Sequence[WorkerOffer]) -> tuple[float, ...]:
        """The figures that decide a curve, with times in train steps. Only the first workers that together make R / T,
        which is what the learner takes, count.
        """
        mu, slot_s, slots = 0.0, 0.0, 0
        for each in ranked:
            if mu * demand.t_train_s > demand.trajectories_per_step:
                break
            mu += each.mu
            slot_s, slots = slot_s + each.slots * each.sample_s, slots + each.slots
        length = math.fsum(demand.lengths) / len(demand.lengths) if demand.lengths else 1.0
        tail = group_times(demand.lengths, demand.group_size, demand.group_patience)
        late = (
            demand.t_bcast_s,
            demand.pause_s,
            demand.recompute_s,
            length * slot_s / max(1, slots),
        )
        # A time that is much shorter than a train step may change by more than 10 %.
        return (
            demand.publish_every,
            tail,
            *(1.0 + each / demand.t_train_s for each in late),
        )


class Pools:
    """See the module docstring. ranked: the workers in the order in which they are taken.

    times: step times of an earlier demand and earlier workers that hardly differ; None: `play` plays pools, and finds
    the best one.
    slower: the estimated throughput of workers is divided by this (`target_raise`).
    """

    def __init__(
        self,
        demand: Demand,
        ranked: Sequence[WorkerOffer],
        learner_usd_per_h: float,
        times: StepTimes | None = None,
        *,
        slower: float = 1.0,
    ) -> None:
        self._slower = slower
        self.demand, self._learner = demand, learner_usd_per_h or LEARNER_USD_PER_H
        self._mu = list(accumulate((each.mu for each in ranked), initial=0.0))
        self._usd_per_h = list(accumulate((each.usd_per_h for each in ranked), initial=0.0))
        self.times = StepTimes(demand, ranked) if times is None else times
        self._left = self._plays() if times is None and ranked else iter(())
        self.best = self.of(0) if times is None else self._cheapest()

    def play(self) -> bool:
        """Play a pool, which takes some 10 ms; False: all pools that are needed have been played."""
        played = next(self._left, None) is not None
        if not played:
            self.best = self._cheapest()
        return played

    def played(self) -> Self:
        """Play all pools that are needed, at once."""
        while self.play():
            pass
        return self

    def step_s(self, mu: float) -> float:
        """Seconds between two commits with workers of this estimated throughput."""
        return self.times.step_s(mu / self._slower)

    def usd_per_step(self, mu: float, usd_per_h: float) -> float:
        """The price of a step with workers of this throughput and price; infinite without any."""
        return (self._learner + usd_per_h) * self.step_s(mu) / 3600.0

    def bubble(self, mu: float) -> float:
        """The share of its time for which the learner waits, 0 to 1."""
        return max(0.0, 1.0 - self.demand.t_train_s / self.step_s(mu))

    def of(self, workers: int) -> PricedPool:
        """The pool of the first `workers` workers."""
        mu, usd_per_h = self._mu[workers], self._usd_per_h[workers]
        return PricedPool(workers, mu, usd_per_h, self.step_s(mu), self.usd_per_step(mu, usd_per_h))

    def why(self) -> str:
        """Why the cheapest pool is the cheapest: its price per step, and those of the pools beside it."""
        best, most = self.best, len(self._mu) - 1
        if not best.workers:
            return ""
        fewer = bisect_left(self._mu, best.mu / BESIDE, hi=best.workers) - 1
        more = bisect_left(self._mu, best.mu * BESIDE, lo=best.workers)
        beside = sorted({max(1, fewer), min(most, more)} - {best.workers})
        would = [
            f"{each.workers} would cost {each.usd_per_step:.4g}" for each in map(self.of, beside)
        ]
        words = f"{best.workers} workers cost {best.usd_per_step:.4g} usd a step"
        return "; ".join([words, ", ".join(would)] if would else [words])

    # --- inside

    def _plays(self) -> Iterator[int]:
        """Play pools of different sizes: first sizes far apart, then those near the cheapest. Yields after each."""
        # Pools that make less than a fifth of what the learner takes at most (R / T) are not played.
        least = 0.2 * self.demand.trajectories_per_step / self.demand.t_train_s
        number, cheapest, most = self.times.first(least), math.inf, len(self._mu) - 1
        while True:
            self.times.play(number)
            yield number
            usd = self.of(number).usd_per_step
            cheapest = min(usd, cheapest)
            # Larger pools are not played once one costs 1.3 times as much as the cheapest.
            if number == most or cheapest * 1.3 < usd < math.inf:
                break
            number = min(most, max(number + 1, self.times.first(self._mu[number] * PLAYED_TIMES)))
        for _ in range(PLAYED_MORE):
            yield self.times.play_near(self._cheapest().workers)

    def _cheapest(self) -> PricedPool:
        steps_s = self.times.steps_s([mu / self._slower for mu in self._mu])
        every = [
            (self._learner + usd_per_h) * step_s
            for usd_per_h, step_s in zip(self._usd_per_h, steps_s, strict=True)
        ]
        enough = (1 + SAME) * min(every)
        return self.of(next(workers for workers, usd in enumerate(every) if usd <= enough))
