"""What a run measures of itself, with `estimators`: of the learner, of broadcasts, and of each worker's work.

mu_i is what a worker makes while its slots are leased: accepted trajectories over leased slot-seconds, all slots
together, without the time in which its engines stood still for a version. What a worker holds is told whenever that
changes (`holds`); in between it is constant, so the sum is exact. Known of a newcomer beforehand is what the operator
said, else what the others make with a slot. Nothing of this is durable: after a restart it is measured anew.
Not here: what follows from it (`provisioning`), and counters for people (`figures`).
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from echo2d.core.bounded import keep_newest
from echo2d.core.estimators import Estimate, Share, Smoothed, Tail, WorkerRate
from echo2d.core.ids import PeerId

MEMORY_PERIODS = 3.0  # publish periods of leased time that a worker's rate remembers ...
MEMORY_S_MIN = 60.0  # ... and no less than that: of shorter periods each has a handful of trajectories
STILLS_MAX = 16  # of a worker: more refits than a trajectory lasts; of older ones nothing is taken off
WORKERS_MAX = 1024  # whose work is remembered: as many as there are peers


@dataclass(slots=True)
class _Work:
    """Of one worker since its rate was last brought up to date. holds: samples, since `at`."""

    slots: int
    at: float
    holds: int = 0
    accepted: int = 0
    slot_s: float = 0.0
    stills: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=STILLS_MAX))  # from, until
    rate: WorkerRate | None = None

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
class Measures:
    """See the module docstring. `now` is monotonic seconds."""

    group_size: int
    t_train: Smoothed = field(default_factory=Smoothed)
    t_bcast: Tail = field(default_factory=Tail)
    t_gen: Tail = field(default_factory=Tail)  # of a trajectory, from its lease to its acceptance
    pause: Smoothed = field(default_factory=Smoothed)  # of a refit
    wire_bytes: Smoothed = field(default_factory=Smoothed)  # of a version, as it spreads
    discards: Share = field(default_factory=Share)
    _work: dict[PeerId, _Work] = field(default_factory=dict)

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
        memory_s = max(MEMORY_S_MIN, MEMORY_PERIODS * max(period_s, 0.0 if t_gen is None else t_gen.value))
        for worker, work in self._work.items():
            work.until(now)
            leased_s = work.slot_s / max(1, work.slots)
            if work.rate is None:
                prior = said.get(worker) or self._of_a_slot(work.slots) or _own(work.accepted, leased_s)
                if prior is None:
                    continue
                work.rate = WorkerRate(prior, self.group_size, memory_s)
            work.rate.memory_s = memory_s
            work.rate.add(work.accepted, leased_s)
            work.accepted, work.slot_s = 0, 0.0

    def rate(self, worker: PeerId) -> Estimate | None:
        """mu_i in trajectories/s as of the last `settle`; None: not measured yet."""
        work = self._work.get(worker)
        return None if work is None or work.rate is None else work.rate.estimate

    def mu(self, worker: PeerId, slots: int, said: float | None) -> float:
        """The same; of a newcomer what is said, or what the others make with as many slots. 0: nothing is known."""
        work = self._work.get(worker)
        known = None if work is None else work.rate
        return known.value if known is not None else said or self._of_a_slot(slots) or 0.0

    def _of_a_slot(self, slots: int) -> float | None:
        """What so many slots make, by those of the others that have made something."""
        known = [
            work.rate.value / work.slots
            for work in self._work.values()
            if work.rate is not None and work.rate.samples and work.slots
        ]
        return median(known) * slots if known and slots else None

    def check(self) -> None:
        assert len(self._work) <= WORKERS_MAX
        assert all(work.holds >= 0 <= work.accepted and work.slot_s >= 0 for work in self._work.values())


def _own(accepted: int, leased_s: float) -> float | None:
    """Of the first one ever; of that alone nothing is known yet."""
    return accepted / leased_s if accepted and leased_s > 0 else None
