"""Decides which of the buffered groups a step takes: how many of each task, and which ones first.

How many of each task (`Quotas`):

    weights 0.5 / 0.3 / 0.2, 4 groups:  step 1: 2 1 1,  step 2: 2 1 1,  step 3: 2 2 0,  ...

Each step has floor(groups x share) of every task. The remaining groups go to the tasks that have had the
least of their share so far. So every step is within one group of the exact share, and the sum over steps
never drifts away from it.

Which ones first, if `policy.order` is "priority" (`by_priority`):

    a group might find no place before its last step --> it is taken, the earliest last step first
    all others                                       --> those whose rewards differ most first

Taking the oldest groups first would lose no group that can be saved. This order loses none either. For every later
step, the groups that stay and are too old after that step, and all groups in flight, together fit into the places up to
that step. So priority decides only between groups that can also enter a later step; if every place is needed, it
decides nothing. DistRL (arXiv 2410.14803) sets the priority of what it replays by the temporal difference error. Here
the corresponding error is the advantage, a reward less its group's mean, so the priority of a group is the spread of
its rewards (`contrast`). Nothing is replayed here (I4).
Not here: which groups fit into the step at all (`staleness`).
"""

from collections.abc import Callable, Collection, Sequence
from fractions import Fraction
from typing import NamedTuple

from echo2d.core.base.ids import GroupId


class Quotas:
    """How many groups of each task a step takes.

    weights: the weight of each task, above 0. groups: how many groups one step takes, all tasks together.
    """

    def __init__(self, weights: Sequence[Fraction], groups: int) -> None:
        total = sum(weights)
        self._exact = [weight * groups / total for weight in weights]
        self._groups = groups
        self._steps: list[tuple[int, ...]] = []
        # How many more groups each task should have had by the end of the last step of `_steps`.
        self._owed = [Fraction(0)] * len(weights)

    def of(self, step: int) -> tuple[int, ...]:
        """How many groups of each task are in this step; steps count from 1."""
        while len(self._steps) < step:
            if self._steps and not any(self._owed):
                # Nothing is owed, as before the first step: the quotas repeat.
                return self._steps[(step - 1) % len(self._steps)]
            self._steps.append(self._next())
        return self._steps[step - 1]

    def _next(self) -> tuple[int, ...]:
        quotas = [int(exact) for exact in self._exact]
        owed = [
            before + exact - quota
            for before, exact, quota in zip(self._owed, self._exact, quotas, strict=True)
        ]
        most_owed = sorted(range(len(owed)), key=lambda task: (-owed[task], task))
        for task in most_owed[: self._groups - sum(quotas)]:
            quotas[task] += 1
            owed[task] -= 1
        self._owed = owed
        return tuple(quotas)


class Fitting(NamedTuple):
    """A buffered group that the step can take."""

    last_step: int  # no later step can take it
    priority: float
    group: GroupId


def by_priority(
    fitting: Sequence[Fitting], later: Collection[int], places: int, room: Callable[[int], int]
) -> list[GroupId]:
    """The groups for `places` places of a step; fewer if there are no more.

    later: the last steps of buffered groups that only a later step can take. room(last_step): the places of
    the steps after this one up to last_step, less the groups in flight.
    """
    ranked = sorted(fitting, key=lambda each: (-each.priority, each.last_step, each.group))
    taken: dict[GroupId, Fitting] = {}
    for last_step in sorted({each.last_step for each in fitting}):
        ending = [each for each in ranked if each.last_step <= last_step]
        staying = [each for each in ending if each.group not in taken]
        others = sum(each <= last_step for each in later)
        must = len(staying) + others - max(0, room(last_step))
        taken.update((each.group, each) for each in staying[: max(0, must)])
    taken = dict(list(taken.items())[:places])
    rest = [each.group for each in ranked if each.group not in taken]
    return [*taken, *rest[: places - len(taken)]]
