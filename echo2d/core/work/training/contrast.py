"""How much the rewards of a group differ: which of its samples contrast most, and which groups teach nothing.

    16 rewards, sorted   0 0 0 0 1 1 1 1 1 1 1 1 1 1 1 1     (0, 1), (0, 1), ... : pairs from the ends inwards
    8 are kept           0 0 0 0                 1 1 1 1     the pairs that contrast most

Pairwise trajectory sampling of Shuffle-R1 (arXiv 2508.05612): twice as many samples are drawn as are
trained on. Among equal rewards the samples with the lowest numbers are kept, so that neither speed nor length
decides.

Groups whose rewards are all the same would teach the learner nothing, and are filtered (`VarianceFilter`).
A step filters at most EXTRA_STEPS_MAX * R trajectories. Later groups are taken as they are, so that a task whose
rewards never differ does not stop the run.
Not here: what happens to the samples that are left out, and to a filtered group (`groups`).
"""

import math
from collections.abc import Mapping, Sequence

from echo2d.core.protocol.trajectory import GroupRecord
from echo2d.core.rules.run import RunRules

# A spread is cut here; the learner refuses rewards beyond it.
SPREAD_MAX = 1e15
# A step draws at most 4 R trajectories more because groups had no variance, or 8 R with pairs.
EXTRA_STEPS_MAX = 4


def spread(rewards: Sequence[float]) -> float:
    """The standard deviation of these rewards, exactly 0 if they are all the same or there are none."""
    if not rewards or min(rewards) == max(rewards):
        return 0.0
    mean = sum(reward / len(rewards) for reward in rewards)
    deviation = math.hypot(*(reward - mean for reward in rewards)) / math.sqrt(len(rewards))
    return min(deviation, SPREAD_MAX)


def most_contrasting(rewards: Mapping[int, float], count: int) -> set[int]:
    """Choose the `count` samples whose rewards contrast most; all samples if there are no more.

    Half of them have the highest rewards and half the lowest; if `count` is odd, one more has a high one.
    """
    if len(rewards) <= count:
        return set(rewards)
    high = sorted(rewards, key=lambda sample: (-rewards[sample], sample))[: (count + 1) // 2]
    rest = rewards.keys() - set(high)
    low = sorted(rest, key=lambda sample: (rewards[sample], sample))[: count // 2]
    return {*high, *low}


def no_variance(record: GroupRecord) -> bool:
    """Whether all rewards are the same. A group of one sample always has variance."""
    return (
        len(record.trajectories) > 1
        and len({trajectory.reward for trajectory in record.trajectories}) == 1
    )


class VarianceFilter:
    """See the module docstring."""

    def __init__(self, rules: RunRules) -> None:
        self._rules = rules
        # How many trajectories were filtered out while `_step` was the open step.
        self._filtered = 0
        self._step = 0

    def opened(self, step: int) -> None:
        """Record the open step: a new one begins to count its filtered trajectories from 0."""
        if step != self._step:
            self._filtered, self._step = 0, step

    def concerns(self, record: GroupRecord) -> bool:
        """Whether this group should be filtered."""
        alone = len(record.trajectories) == 1 < self._rules.group_size
        return self._rules.filter_zero_variance and (alone or no_variance(record))

    def filter(self) -> bool:
        """Filter one group. False: the step has filtered enough, and the group is taken."""
        size = self._rules.group_size
        if self._filtered + size > EXTRA_STEPS_MAX * self._rules.trajectories_per_step:
            return False
        self._filtered += size
        return True
