"""What a run measures of itself, with `estimators`: of the learner, of broadcasts, and of each worker's work.

mu_i is what a worker makes while its slots are leased: accepted trajectories over leased slot-seconds, all slots
together, without the time in which its engines stood still for a version. The mean of that time over those that are
active, each worker's by its mu_i, is what a version takes from the pool, if they have work. What a worker holds is told
whenever that changes (`holds`); in between it is constant, so the sum is exact. Known of a newcomer beforehand is what
the operator said, else what the others make with a slot. Answers become longer or shorter while a model learns: the
rate of who stands by is moved as those who work have moved since (`_drift`: the geometric mean of their changes,
multiplied up, so that what goes up and down again leaves nothing). Nothing of this is durable: after a restart it is
measured anew. Not here: what follows from it (`demand`), and counters for people (`cluster/statistics`).
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import geometric_mean, median

from echo2d.core.base.bounded_dict import keep_newest
from echo2d.core.base.ids import PeerId
from echo2d.core.capacity.estimators import (
    PRIOR_TRAJECTORIES,
    Estimate,
    Share,
    Smoothed,
    Tail,
    WorkerRate,
)

MEMORY_PERIODS = 3.0  # publish periods of leased time that a worker's rate remembers ...
MEMORY_S_MIN = (
    60.0  # ... and no less than that: of shorter periods each has a handful of trajectories
)
STILLS_MAX = (
    16  # of a worker: more refits than a trajectory lasts; of older ones nothing is taken off
)
WORKERS_MAX = 1024  # whose work is remembered: as many as there are peers
EXPERIENCED = (
    4 * PRIOR_TRAJECTORIES
)  # made by a worker whose rate moves with the answers, and no more with its prior
DRIFT_MAX = 2.0  # of one worker's rate from one look to the next: more is no change of answers


@dataclass(slots=True)
class _Work:
    """Of one worker since its rate was last brought up to date. holds: samples, since `at`. drift: then.

    expected: trajectories that it would have made so far at the rate that was thought of it. still_s: for the newest
    version that it serves.
    """

    slots: int
    at: float
    holds: int = 0
    still_s: float | None = None
    accepted: int = 0
    slot_s: float = 0.0
    stills: deque[tuple[float, float]] = field(
        default_factory=lambda: deque(maxlen=STILLS_MAX)
    )  # from, until
    rate: WorkerRate | None = None
    drift: float = 1.0
    expected: float = 0.0

    def until(self, now: float) -> None:
        if self.holds and now > self.at:
            self.slot_s += self.holds * (now - self.at)
        self.at = now

    def still_since(self, since: float) -> float:
        """Seconds that its engines stood still since then; newest first, for the older ones ended before."""
        still_s = 0.0
        for begun, until in reversed(self.stills):
            if until <= since:
                break
            still_s += until - max(since, begun)
        return still_s


@dataclass(slots=True)
class Measurements:
    """See the module docstring. `now` is monotonic seconds."""

    group_size: int
    t_train: Smoothed = field(default_factory=Smoothed)
    t_bcast: Tail = field(default_factory=Tail)
    t_gen: Tail = field(default_factory=Tail)  # of a trajectory, from its lease to its acceptance
    pause: Smoothed = field(default_factory=Smoothed)  # of a refit
    still: Smoothed = field(default_factory=Smoothed)  # of the pool, for one version
    wire_bytes: Smoothed = field(default_factory=Smoothed)  # of a version, as it spreads
    discards: Share = field(default_factory=Share)
    _work: dict[PeerId, _Work] = field(default_factory=dict)
    _drift: float = 1.0
    _slot_makes: float | None = None  # trajectories/s, as of the last `settle`

    def holds(self, worker: PeerId, slots: int, samples: int, *, now: float) -> None:
        """From now on it holds so many samples."""
        work = self._work.get(worker)
        if work is None:
            work = self._work[worker] = _Work(slots, now)
            keep_newest(self._work, WORKERS_MAX)
        work.until(now)
        work.slots, work.holds = slots, samples

    def accepted(self, worker: PeerId, since: float | None, *, now: float) -> None:
        """A result of it, leased since then (None: not known any more)."""
        work = self._work.get(worker)
        if work is None:
            return
        work.accepted += 1
        if since is not None:
            self.t_gen.add(max(0.0, now - since - work.still_since(since)))

    def stood_still(self, worker: PeerId, seconds: float, *, now: float) -> None:
        """Its engines wrote nothing for so long until now, for a version's sake."""
        self.forgive(worker, seconds, now=now)
        if worker in self._work:
            self._work[worker].still_s = seconds

    def version_served(self, workers: Iterable[PeerId]) -> float | None:
        """By all that were to. Seconds that they stood still for it; None: that is not known."""
        works = {worker: self._work[worker] for worker in workers if worker in self._work}
        stills = [
            (self.mu(worker, work.slots, None) or work.slots, work.still_s)
            for worker, work in works.items()
            if work.still_s is not None
        ]
        weight = sum(each[0] for each in stills)
        if not weight:
            return None
        still_s = sum(mu * seconds for mu, seconds in stills) / weight
        self.still.add(still_s)
        return still_s

    def forgive(self, worker: PeerId, seconds: float, *, now: float) -> None:
        """For so long until now it had nothing to do, through no fault of its own, nor for a version's sake."""
        work = self._work.get(worker)
        if work is not None:
            work.until(now)
            work.slot_s = max(0.0, work.slot_s - work.holds * seconds)
            work.stills.append((now - seconds, now))

    def useless(self, worker: PeerId, seconds: float) -> None:
        """For so long it was given nothing for a reason of its own: as if it had made nothing of all its slots."""
        work = self._work.get(worker)
        if work is not None:
            work.slot_s += max(0, work.slots - work.holds) * seconds

    def settle(self, period_s: float, said: Mapping[PeerId, float], *, now: float) -> None:
        """Bring all rates up to date. said: trajectories/s that the operator expects of a worker."""
        t_gen = self.t_gen.estimate
        memory_s = max(
            MEMORY_S_MIN, MEMORY_PERIODS * max(period_s, 0.0 if t_gen is None else t_gen.value)
        )
        for work in self._work.values():
            work.until(now)
        worked = [work for work in self._work.values() if work.slot_s]
        if self._slot_makes is None:
            self._slot_makes = _together(worked)
        for worker, work in self._work.items():
            prior = said.get(worker) or (self._of_a_slot(work.slots) if work.slot_s else None)
            if work.rate is None and prior:
                work.rate, work.drift = WorkerRate(prior, self.group_size, memory_s), self._drift
        moved = [self._settle(work, memory_s) for work in worked]
        if changes := [change for change in moved if change is not None]:
            self._drift *= geometric_mean(changes)
        for work in worked:
            work.drift = self._drift
        known = [
            work
            for work in self._work.values()
            if work.rate is not None and work.rate.samples and work.slots
        ]
        makes = [self._now(work).value / work.slots for work in known]
        self._slot_makes = median(makes) if makes else self._slot_makes

    def rate(self, worker: PeerId) -> Estimate | None:
        """mu_i in trajectories/s as of the last `settle`; None: not measured yet."""
        work = self._work.get(worker)
        return None if work is None or work.rate is None else self._now(work)

    def mu(self, worker: PeerId, slots: int, said: float | None) -> float:
        """The same; of a newcomer what is said, or what the others make with as many slots. 0: nothing is known."""
        work = self._work.get(worker)
        if work is None or work.rate is None:
            return said or self._of_a_slot(slots) or 0.0
        return work.rate.value * self._drift / work.drift

    def guessed(self, worker: PeerId) -> bool:
        """Whether its own work has not shown yet what it makes."""
        work = self._work.get(worker)
        if work is None or work.rate is None:
            return True
        return max(work.rate.samples, work.expected) < PRIOR_TRAJECTORIES

    # --- inside

    def _settle(self, work: _Work, memory_s: float) -> float | None:
        """Of one that has worked. By how much its rate has changed, if that shows how answers have."""
        if work.rate is None:
            return None
        leased_s, before = work.slot_s / max(1, work.slots), self._now(work)
        work.rate.follow(self._drift / work.drift)
        work.rate.memory_s = memory_s
        work.rate.add(work.accepted, leased_s)
        work.expected += leased_s * work.rate.prior
        work.accepted, work.slot_s = 0, 0.0
        change = work.rate.estimate.value / before.value
        return min(DRIFT_MAX, max(1 / DRIFT_MAX, change)) if before.samples >= EXPERIENCED else None

    def _now(self, work: _Work) -> Estimate:
        """Its rate, moved as those of the others have moved since."""
        assert work.rate is not None
        found, moved = work.rate.estimate, self._drift / work.drift
        return (
            found
            if moved == 1.0
            else Estimate(found.value * moved, found.sd * moved, found.samples)
        )

    def _of_a_slot(self, slots: int) -> float | None:
        """What so many slots make, by those of the others that have made something."""
        return self._slot_makes * slots if self._slot_makes is not None and slots else None

    def check(self) -> None:
        assert len(self._work) <= WORKERS_MAX
        assert 0 < self._drift < math.inf
        assert all(
            work.holds >= 0 <= work.accepted and work.slot_s >= 0 for work in self._work.values()
        )


def _together(worked: Iterable[_Work]) -> float | None:
    """What a slot has made, of the first ones ever; None: too little, and what is under way would count for nothing."""
    works = [(work.accepted, work.slot_s) for work in worked]
    accepted, slot_s = sum(each[0] for each in works), sum(each[1] for each in works)
    return accepted / slot_s if accepted >= EXPERIENCED and slot_s > 0 else None
