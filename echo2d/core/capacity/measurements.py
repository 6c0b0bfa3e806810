"""Measures a run: the learner's steps, its broadcasts, and how much each worker makes (mu_i).

mu_i is the number of trajectories accepted from a worker per second with all its slots leased. The
time in which its engines stand still for a version does not count, nor does the time in which they
then compute KV caches again. A version costs the pool the usual time to compute KV caches again, and
the mean standstill of the active workers, weighted by mu_i. A newcomer's prior is what the operator
stated, or else what other workers make with a slot.

Answers become longer or shorter while a model learns. So the rate of a standby worker follows the rates of the
working ones: `_drift` is the running product of the factors by which the sum of these rates changed, so a change that
is undone leaves no trace in it. (The mean of the rates' logarithms would fall by noise alone where lengths have a long
tail.)

Nothing here is durable; a restarted coordinator measures again. Not here: what follows from the
figures (`demand`), and counters for people (`cluster/statistics`).
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median

from echo2d.core.base.bounded_dict import keep_newest
from echo2d.core.base.ids import PeerId
from echo2d.core.capacity.estimators import (
    PRIOR_TRAJECTORIES,
    Estimate,
    Lengths,
    RecentMean,
    Share,
    Smoothed,
    Tail,
    WorkerRate,
)
from echo2d.core.capacity.yields import Yields

# This many pauses of a worker are remembered: more than fall within one trajectory.
STILLS_MAX = 16
_WORKERS_MAX = 2048  # as many as there are peers
# After this many trajectories a worker's rate shows how answers change, and no longer its prior.
EXPERIENCED = 4 * PRIOR_TRAJECTORIES
# The worker must also have worked for this many periods in a row: a worker that is chosen because it looks fast may
# have looked so by chance, and then looks slower although answers have not changed.
STEADY = 6
# The lateness of this many broadcasts is remembered.
LATE_MAX = 8
# If a rate moves by a larger factor between two calls of `settle`, the cause is not that answers changed.
DRIFT_MAX = 2.0


@dataclass(slots=True)
class _Work:
    """One worker's work since its rate was last settled."""

    slots: int
    at: float
    # Samples that the worker has held since `at`.
    holds: int = 0
    # How long the worker stood still for the newest version that it serves.
    still_s: float | None = None
    # Accepted trajectories.
    accepted: float = 0.0
    # Leased slot-seconds.
    slot_s: float = 0.0
    # The worker's pauses, as (begin, end).
    stills: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=STILLS_MAX))
    rate: WorkerRate | None = None
    # `_drift` when the rate was settled.
    drift: float = 1.0
    # Trajectories that the worker would have made so far at its prior rate.
    expected: float = 0.0
    # How many calls of `settle` in a row came after a time in which the worker worked.
    settled: int = STEADY

    def until(self, now: float) -> None:
        """Count the leased slot-seconds up to now; `holds` was constant since `at`."""
        if self.holds and now > self.at:
            self.slot_s += self.holds * (now - self.at)
        self.at = now

    def still_since(self, since: float) -> float:
        """Seconds for which its engines have stood still since then."""
        still_s = 0.0
        # The newest come first: once one ended before `since`, all older ones did.
        for begun, until in reversed(self.stills):
            if until <= since:
                break
            still_s += until - max(since, begun)
        return still_s


@dataclass(slots=True)
class Measurements:
    """The measurements of one run; see the module docstring. `now` is monotonic seconds."""

    group_size: int
    t_train: Smoothed = field(default_factory=Smoothed)
    t_bcast: Tail = field(default_factory=Tail)
    # A trajectory, from its lease to its acceptance.
    t_gen: RecentMean = field(default_factory=RecentMean)
    lengths: Lengths = field(default_factory=Lengths)
    pause: Smoothed = field(default_factory=Smoothed)  # a refit
    recompute: Smoothed = field(default_factory=Smoothed)  # KV caches, after a refit
    still: Smoothed = field(default_factory=Smoothed)  # the pool's pause for one version
    wire_bytes: Smoothed = field(default_factory=Smoothed)  # one version, as it spreads
    # By how many seconds broadcasts took longer than their plans had predicted.
    late_s: deque[float] = field(default_factory=lambda: deque(maxlen=LATE_MAX))
    discards: Share = field(default_factory=Share)
    yields: Yields = field(default_factory=Yields)
    settled: int = 0  # how often `settle` has brought the rates up to date
    _work: dict[PeerId, _Work] = field(default_factory=dict)
    _drift: float = 1.0
    _slot_makes: float | None = None  # trajectories/s, as of the last `settle`

    def holds(self, worker: PeerId, slots: int, samples: int, *, now: float) -> None:
        """The worker holds this many samples from now on. Call this at every change."""
        work = self._work.get(worker)
        if work is None:
            work = self._work[worker] = _Work(slots, now)
            keep_newest(self._work, _WORKERS_MAX)
        work.until(now)
        if slots != work.slots and slots and work.slots and work.rate is not None:
            work.rate.follow(slots / work.slots)
        work.slots, work.holds = slots, samples

    def accepted(
        self, worker: PeerId, since: float | None, share: float = 1.0, *, now: float
    ) -> float | None:
        """A result was accepted, and the worker wrote this share of it; returns its length, see `length`.

        since: when it was first leased; None: another worker ended it, or the time is no longer known, as after a
        restart.
        """
        work = self._work.get(worker)
        if work is None:
            return None
        work.accepted += share
        if since is None:
            return None
        took_s = max(0.0, now - since - work.still_since(since))
        self.t_gen.add(took_s)
        return None if work.rate is None else took_s * work.rate.value / max(1, work.slots)

    def length(self, worker: PeerId, since: float, *, now: float) -> float | None:
        """The worker's time for a sample so far, divided by its usual time for one; None: not known."""
        work = self._work.get(worker)
        if work is None or work.rate is None:
            return None
        took_s = max(0.0, now - since - work.still_since(since))
        return took_s * work.rate.value / max(1, work.slots)

    def stood_still(self, worker: PeerId, seconds: float, *, now: float) -> None:
        """The worker's engines have just stood still for this many seconds, to take a version."""
        self.forgive(worker, seconds, now=now)
        if worker in self._work:
            self._work[worker].still_s = seconds

    def version_served(self, workers: Iterable[PeerId]) -> float | None:
        """All workers that had to serve a version serve it.

        Returns the mean seconds for which these workers stood still for it, weighted by mu_i; None
        if no worker reported any.
        """
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
        """The last `seconds` do not count against the worker, because it could not work."""
        work = self._work.get(worker)
        if work is not None:
            work.until(now)
            work.slot_s = max(0.0, work.slot_s - work.holds * seconds)
            work.stills.append((now - seconds, now))

    def useless(self, worker: PeerId, seconds: float) -> None:
        """The worker was given no lease for a reason of its own.

        Its free slots count as leased for these seconds, so that its rate falls.
        """
        work = self._work.get(worker)
        if work is not None:
            work.slot_s += max(0, work.slots - work.holds) * seconds

    def settle(self, period_s: float, said: Mapping[PeerId, float], *, now: float) -> None:
        """Bring all rates up to date.

        period_s: the publish period. said: trajectories/s that the operator expects, by worker.
        """
        self.settled += 1
        t_gen = self.t_gen.estimate
        # A worker's rate remembers three publish periods of leased time, but no less than a
        # minute: short periods hold only a handful of trajectories each.
        memory_s = max(60.0, 3.0 * max(period_s, 0.0 if t_gen is None else t_gen.value))
        for work in self._work.values():
            work.until(now)
        worked = []
        for work in self._work.values():
            if work.slot_s:
                worked.append(work)
            else:
                work.settled = 0
        # Before any worker has a rate, all of them together show what a slot makes.
        if self._slot_makes is None:
            self._slot_makes = _together(worked)
        for worker, work in self._work.items():
            prior = said.get(worker) or (self._of_a_slot(work.slots) if work.slot_s else None)
            if work.rate is None and prior:
                work.rate, work.drift = WorkerRate(prior, self.group_size, memory_s), self._drift
        moved = [self._settle(work, memory_s) for work in worked]
        if changes := [change for change in moved if change is not None]:
            self._drift *= _together_changed(changes)
        # These workers have measured the change themselves, so only the others have to follow it.
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
        """The worker's mu_i in trajectories/s as of the last `settle`; None: it has no rate yet."""
        work = self._work.get(worker)
        return None if work is None or work.rate is None else self._now(work)

    def slots(self, worker: PeerId) -> int:
        """The number of slots to which the worker's rate refers."""
        return self._work[worker].slots if worker in self._work else 0

    def mu(self, worker: PeerId, slots: int, said: float | None) -> float:
        """The worker's mu_i in trajectories/s, or a guess for a newcomer.

        The guess is `said`, or else what the others make with as many slots; 0 if nothing is known.
        """
        work = self._work.get(worker)
        if work is None or work.rate is None:
            return said or self._of_a_slot(slots) or 0.0
        return work.rate.value * self._drift / work.drift

    def guessed(self, worker: PeerId) -> bool:
        """Whether this worker's rate is still a guess."""
        work = self._work.get(worker)
        if work is None or work.rate is None:
            return True
        return max(work.rate.samples, work.expected) < PRIOR_TRAJECTORIES

    # --- inside ---

    def _settle(self, work: _Work, memory_s: float) -> tuple[float, float] | None:
        """Bring the rate of a worker that has worked up to date.

        Returns the rate before and after; None if the worker is too new to show how the answers have
        changed.
        """
        if work.rate is None:
            return None
        leased_s, before = work.slot_s / max(1, work.slots), self._now(work)
        work.rate.follow(self._drift / work.drift)
        work.rate.memory_s = memory_s
        work.rate.add(work.accepted, leased_s)
        work.expected += leased_s * work.rate.prior
        work.accepted, work.slot_s = 0.0, 0.0
        after = min(DRIFT_MAX * before.value, max(before.value / DRIFT_MAX, work.rate.value))
        work.settled += 1
        steady = work.settled > STEADY and before.samples >= EXPERIENCED
        return (before.value, after) if steady else None

    def _now(self, work: _Work) -> Estimate:
        """The worker's rate, changed by the same factor as the rates of the others since it was settled."""
        assert work.rate is not None
        found, moved = work.rate.estimate, self._drift / work.drift
        return (
            found
            if moved == 1.0
            else Estimate(found.value * moved, found.sd * moved, found.samples)
        )

    def _of_a_slot(self, slots: int) -> float | None:
        """Trajectories/s that this many slots make at other workers; None: not known."""
        return self._slot_makes * slots if self._slot_makes is not None and slots else None

    def check(self) -> None:
        self.yields.check()
        assert len(self._work) <= _WORKERS_MAX
        assert 0 < self._drift < math.inf
        assert all(
            work.holds >= 0 <= work.accepted and work.slot_s >= 0 for work in self._work.values()
        )


def _together(worked: Iterable[_Work]) -> float | None:
    """Trajectories/s of one slot, over all these workers; None if they made too few.

    With few results, the trajectories that are still unfinished would make the figure too low.
    """
    works = [(work.accepted, work.slot_s) for work in worked]
    accepted, slot_s = sum(each[0] for each in works), sum(each[1] for each in works)
    return accepted / slot_s if accepted >= EXPERIENCED and slot_s > 0 else None


def _together_changed(changes: Iterable[tuple[float, float]]) -> float:
    """The factor by which the sum of rates changed."""
    pairs = list(changes)
    return sum([after for _, after in pairs]) / sum([before for before, _ in pairs])
