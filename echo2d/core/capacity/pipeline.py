"""Plays (simulates) some train steps of a run in a few milliseconds, to find how long a step takes with these workers.

The formulas of `model` treat trajectories as a liquid. Here samples have lengths, groups wait for their last sample,
and the gates of staleness decide what begins. So the answer is right where groups have long tails, where S leaves
hardly any time, and where the learner and its workers take turns (S = 0).

    a free slot --gate 1--> a sample --its length--> kept --the whole group, or patience--> buffered --G--> a batch
                                                                                                  |
    a version --B, a pause, C--> served <--every kappa steps-- published <--committed-- the learner, T

Everything is as in a run (`work/training`), except that all workers begin to serve a version at the same time, none is
lost, and no sample moves to another worker. Time is virtual and lengths are in a fixed order, so equal demands give
equal answers.
Not here: which workers there are, and what they cost (`pools`).
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from heapq import heapify, heappop, heappush
from statistics import NormalDist

from blake3 import blake3

from echo2d.core.capacity.model import Demand
from echo2d.core.rules.run import MISSING_SHARE

# At least this many steps and trajectories count, because the longest answers of a step decide its time.
STEPS_MIN, TRAJECTORIES_MIN = 12, 4000
# Lengths that are taken from a log-normal distribution.
LENGTHS = 1 << 12
# A play has about PLAYED_MAX trajectories: of a larger run, only a share of the slots is played, with the same share
# of R. A play that seems to make no progress ends after PLAYED_TIMES_MAX times as many trajectories.
PLAYED_MAX, PLAYED_TIMES_MAX = 6_000, 20


@lru_cache(maxsize=64)
def lengths_of(sigma: float, group_size: int = 1, prompt_share: float = 0.0) -> tuple[float, ...]:
    """Lengths of samples divided by their mean, log-normal, group after group.

    prompt_share: the share of the variance that the samples of a group have in common.
    """
    shuffled = sorted(range(LENGTHS), key=lambda number: blake3(b"%d" % number).digest(8))
    levels = [NormalDist().inv_cdf((number + 0.5) / LENGTHS) for number in shuffled]
    if prompt_share and group_size > 1:
        of_prompt, own = math.sqrt(prompt_share), math.sqrt(1.0 - prompt_share)
        levels = [
            own * level + of_prompt * levels[-1 - at // group_size]
            for at, level in enumerate(levels)
        ]
    lengths = [math.exp(sigma * level) for level in levels]
    mean = math.fsum(lengths) / LENGTHS
    return tuple(length / mean for length in lengths)


def kept_min(group_size: int) -> int:
    """How many samples a group needs before it may go on without the others."""
    return max(group_size - max(1, int(group_size * MISSING_SHARE)), (group_size + 1) // 2, 2)


@lru_cache(maxsize=64)
def group_times(lengths: tuple[float, ...], group_size: int, patience: float) -> float:
    """The mean time of a whole group divided by that of a sample, if all samples of a group begin at once."""
    needed, total, count = kept_min(group_size), 0.0, 0
    for first in range(0, len(lengths) - group_size + 1, group_size):
        group = sorted(lengths[first : first + group_size])
        waits = patience * group[needed - 1] if patience and needed < group_size else math.inf
        total, count = total + min(group[-1], waits), count + 1
    mean = math.fsum(lengths) / len(lengths) if lengths else 1.0
    return total / count / mean if count and mean else 1.0


@dataclass(slots=True, eq=False)
class _Group:
    """A group that is being made."""

    begun: float  # seconds
    version: int
    to_lease: int  # samples
    kept: int = 0  # samples
    # When its patience ends.
    due: float | None = None
    open: bool = True
    # For each sample, the slot that writes it.
    slots: dict[int, float] = field(default_factory=dict)


class Pipeline:
    """See the module docstring. slots: for each slot, the seconds that a sample of length 1 takes in it."""

    def __init__(self, demand: Demand, slots: Sequence[float]) -> None:
        self._demand = demand
        per_step, kappa = demand.trajectories_per_step, demand.publish_every
        # The first 2 (S + 1) steps do not count: only after them the buffer is as full as it stays.
        self._warm = 2 * (demand.staleness_max + 1)
        steps = max(STEPS_MIN, math.ceil(TRAJECTORIES_MIN / per_step), 4 * kappa)
        self._counts = steps + -steps % kappa  # whole publish periods
        self._per_step, slots = _fewer(
            max(1, per_step // demand.group_size),
            slots,
            PLAYED_MAX / ((self._warm + self._counts) * per_step),
        )
        self._most = PLAYED_TIMES_MAX * PLAYED_MAX
        self._size, self._kept_min = demand.group_size, kept_min(demand.group_size)
        self._lengths, self._at = demand.lengths or (1.0,), 0
        # The free slots, the fastest first; and the seconds of all pauses so far.
        self._free, self._paused_s = list(slots), 0.0
        heapify(self._free)
        # A sample ends at its time here plus `_paused_s`.
        self._samples: list[tuple[float, int, _Group, int]] = []
        self._acts: list[tuple[float, int, str, int]] = []
        self._waiting: list[tuple[float, int, _Group]] = []
        self.played, self._now, self._began = 0, 0.0, 0.0
        self._open: dict[_Group, None] = {}
        self._buffer: deque[_Group] = deque()
        self._begins: _Group | None = None
        self._flat = 0.0
        # n, the step whose batch is filled next, and c, the last step that was committed.
        self._step, self._committed = 1, 0
        # The version published last, the one that spreads next, whether one spreads, and the one that is served.
        self._published, self._next, self._spreading, self._serves = 0, 0, False, -1
        self._trains = self._rests = False

    def step_s(self) -> float:
        """Seconds between two commits, waiting included; infinite if there are none."""
        self._spread()
        while self._committed < self._warm + self._counts:
            self._end_samples()
            if not self._do_next() or self.played > self._most:
                return math.inf
            self._go_on()
            self._lease()
        return (self._now - self._began) / self._counts

    # --- what happens next

    def _end_samples(self) -> None:
        """End the samples that end before anything else happens. The loop is written out, because plays spend most of
        their time here.
        """
        samples, waiting, acts = self._samples, self._waiting, self._acts
        size, patience, kept_min = self._size, self._demand.group_patience, self._kept_min
        while samples and self.played <= self._most:
            due = samples[0][0] + self._paused_s
            if (acts and acts[0][0] < due) or (waiting and waiting[0][0] < due):
                return
            _, _, group, sample = heappop(samples)
            if due > self._now:
                self._now = due
            slot = group.slots.pop(sample, None)
            if slot is None:
                continue  # its group went on without it, or was too old
            heappush(self._free, slot)
            group.kept += 1
            if group.kept == size:
                self._buffer_group(group)
                self._go_on()
            elif patience and group.due is None and group.kept >= kept_min:
                group.due = group.begun + patience * (self._now - group.begun)
                heappush(waiting, (group.due, self._next_number(), group))
            self._lease()

    def _do_next(self) -> bool:
        """Do the next thing other than the end of a sample; False if there is nothing."""
        if self._waiting and (not self._acts or self._waiting[0][0] <= self._acts[0][0]):
            self._now, _, group = heappop(self._waiting)
            self._end_patience(group)
        elif self._acts:
            self._now, _, what, version = heappop(self._acts)
            self._act(what, version)
        else:
            return False
        return True

    def _go_on(self) -> None:
        """Fill the batches that can be filled, and let the learner train."""
        while self._fill():
            pass
        if not self._trains and self._step > self._committed + 1:
            self._trains = True
            self._schedule(self._demand.t_train_s, "trained")

    def _end_patience(self, group: _Group) -> None:
        if not group.open:
            return
        if group.to_lease:  # it waits for a slot, not for an answer
            longer_s = max(1.0, self._now - group.begun)
            heappush(self._waiting, (self._now + longer_s, self._next_number(), group))
        else:
            self._buffer_group(group)

    def _act(self, what: str, version: int) -> None:
        demand = self._demand
        if what == "trained":
            self._trains, self._committed = False, self._committed + 1
            if self._committed == self._warm:
                self._began = self._now
            if self._committed - self._published >= demand.publish_every:
                self._published = self._next = self._committed
                self._spread()
        elif what == "verified":
            still_s = self._still_s
            self._rests = True
            self._paused_s += still_s + demand.recompute_s
            self._schedule(still_s, "served", version)
            self._schedule(still_s + demand.recompute_s, "rested")
        elif what == "served":
            self._serves, self._spreading = version, False
            self._spread()
        else:
            self._rests = False

    @property
    def _still_s(self) -> float:
        demand = self._demand
        if demand.mode == "exclusive":
            return demand.still_share * demand.t_bcast_s
        return min(demand.pause_s, demand.t_bcast_s)

    def _spread(self) -> None:
        if not self._spreading and self._next > self._serves:
            self._spreading = True
            self._schedule(self._demand.t_bcast_s - self._still_s, "verified", self._next)

    # --- groups and batches

    def _buffer_group(self, group: _Group) -> None:
        """Buffer a group whose samples are all kept, or that goes on without the others."""
        self._close(group)
        self._flat += self._demand.flat
        if self._flat >= 1.0:
            self._flat -= 1.0  # all its rewards are the same
        else:
            self._buffer.append(group)

    def _close(self, group: _Group) -> None:
        group.open = False
        del self._open[group]
        for slot in group.slots.values():
            heappush(self._free, slot)
        group.slots.clear()
        if self._begins is group:
            self._begins = None

    def _fill(self) -> bool:
        """Fill batch n, if it has been asked for and enough groups are there."""
        if self._step > self._committed + 2 or len(self._buffer) < self._per_step:
            return False
        last = self._step - 1 - self._demand.staleness_max
        for group in [each for each in self._open if each.due is not None and each.version <= last]:
            self._buffer_group(group)
        taken = sorted(self._buffer, key=lambda group: group.version)
        self._step += 1
        oldest = self._step - 1 - self._demand.staleness_max
        self._buffer = deque(group for group in taken[self._per_step :] if group.version >= oldest)
        for group in [each for each in self._open if each.version < oldest]:
            self._close(group)
        return True

    def _lease(self) -> None:
        if self._rests or self._serves < 0:
            return
        free, lengths, group = self._free, self._lengths, self._begins
        while free:
            if group is None or not group.to_lease:
                ahead = self._serves + self._demand.staleness_max + 2 - self._step
                if len(self._buffer) + len(self._open) >= ahead * self._per_step:
                    return
                group = self._begins = _Group(self._now, self._serves, self._size)
                self._open[group] = None
            slot = heappop(free)
            group.to_lease -= 1
            group.slots[group.to_lease] = slot
            due = self._now - self._paused_s + slot * lengths[self._at]
            self._at = (self._at + 1) % len(lengths)
            self.played += 1
            heappush(self._samples, (due, self.played, group, group.to_lease))

    def _schedule(self, seconds: float, what: str, version: int = 0) -> None:
        heappush(self._acts, (self._now + max(0.0, seconds), self._next_number(), what, version))

    def _next_number(self) -> int:
        self.played += 1
        return self.played


def _fewer(per_step: int, slots: Sequence[float], share: float) -> tuple[int, Sequence[float]]:
    """About this share of the groups of a step, and of the slots; the two shares differ by a hundredth at most."""
    fewer = max(1, int(per_step * share))
    while fewer < per_step:
        taken = round(len(slots) * fewer / per_step)
        if taken and abs(taken * per_step / (len(slots) * fewer) - 1.0) < 0.01:
            ranked = sorted(slots)
            return fewer, [ranked[number * len(slots) // taken] for number in range(taken)]
        fewer += 1
    return per_step, slots
