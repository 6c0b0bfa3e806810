"""Filters groups whose rewards are all the same: they would teach the learner nothing.

A step filters at most EXTRA_STEPS_MAX times its groups of R trajectories. The groups after that are taken as
they are, so that a task whose rewards never differ does not stop the run.
Not here: what happens to a filtered group (`groups`).
"""

from echo2d.core.cluster.rules import RunRules
from echo2d.core.protocol.trajectory import GroupRecord

# A step draws at most 4 R trajectories more because groups had no variance; of pairs, 8 R.
EXTRA_STEPS_MAX = 4


class VarianceFilter:
    """See the module docstring."""

    def __init__(self, rules: RunRules) -> None:
        self._rules = rules
        # Trajectories that were filtered out while `_step` was the open step.
        self._filtered = 0
        self._step = 0

    def opened(self, step: int) -> None:
        """This is the open step: a new one filters from the start."""
        if step != self._step:
            self._filtered, self._step = 0, step

    def concerns(self, record: GroupRecord) -> bool:
        """Whether this group ought to be filtered."""
        alone = len(record.trajectories) == 1 < self._rules.group_size
        return self._rules.filter_zero_variance and (alone or no_variance(record))

    def filter(self) -> bool:
        """Filter one group. False: the step has filtered enough, and the group is taken."""
        size = self._rules.group_size
        if self._filtered + size > EXTRA_STEPS_MAX * self._rules.trajectories_per_step:
            return False
        self._filtered += size
        return True


def no_variance(record: GroupRecord) -> bool:
    """Whether all rewards are the same. A group of one sample always has variance."""
    return (
        len(record.trajectories) > 1
        and len({trajectory.reward for trajectory in record.trajectories}) == 1
    )
