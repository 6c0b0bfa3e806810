"""Decides which groups have waited long enough for their last samples, and are trained on without them.

    seven of eight samples are kept --> a deadline: `group_patience` times what these took
                                            |
    it passes, or the last batch that can take the group is filled --> the others are left out

At most `missing_share` of the samples may be missing; one may be missing even if the share comes to
less than one. A missing sample is very long, or its worker hangs. Without this rule the whole group
would be dropped once it is too old.
Not here: leaving the samples out (`groups`).
"""

from collections.abc import Callable

from echo2d.core.base.ids import GroupId
from echo2d.core.rules.run import MISSING_SHARE, RunRules
from echo2d.core.rules.tasks import TaskRules
from echo2d.core.work.training.group_table import GroupTable, OpenGroup

# At least this many samples must be kept: a single reward cannot be compared.
KEPT_MIN = 2
_WAIT_S_MIN = 1.0  # seconds until a group that waits for a slot is checked again, at least


class Patience:
    """See the module docstring. `now` is monotonic seconds.

    is_last_step: whether the open step is the last one that can take a group.
    """

    def __init__(
        self, rules: RunRules, groups: GroupTable, is_last_step: Callable[[OpenGroup], bool]
    ) -> None:
        self._factor = rules.group_patience
        self._groups, self._is_last_step = groups, is_last_step
        self._kept_min = {task.name: _kept_min(rules, task) for task in rules.tasks}
        # When each group has waited long enough.
        self._due: dict[GroupId, float] = {}
        self._first: float | None = None

    def kept(self, group: OpenGroup, *, now: float) -> None:
        """Record that one more sample of the group is kept, while others are missing."""
        if not self._factor or len(group.kept) < self._kept_min[group.task.name]:
            return
        if group.group not in self._due:
            self._due[group.group] = due = group.begun + self._factor * (now - group.begun)
            self._first = due if self._first is None else min(due, self._first)

    def wake_at(self) -> float | None:
        """When the next group will have waited long enough."""
        return self._first

    def over(self, *, now: float) -> list[OpenGroup]:
        """The groups that have waited long enough."""
        if self._first is None or now < self._first:
            return []
        for number, due in self._due.items():
            group = self._groups.get(number)
            if now >= due and group is not None and not _all_leased(group):
                # This group waits for a slot, not for an answer: give it more time.
                self._due[number] = now + max(_WAIT_S_MIN, now - group.begun)
        return self._take(lambda _, due: now >= due)

    def last_call(self) -> list[OpenGroup]:
        """The groups that no later step can take. Call it before the open step gets its batch."""
        return self._take(lambda group, _: self._is_last_step(group)) if self._due else []

    def _take(self, wanted: Callable[[OpenGroup, float], bool]) -> list[OpenGroup]:
        found: list[OpenGroup] = []
        for number, due in list(self._due.items()):
            group = self._groups.get(number)
            if group is None or len(group.kept) < self._kept_min[group.task.name]:
                del self._due[number]
            elif wanted(group, due):
                del self._due[number]
                found.append(group)
        self._first = min(self._due.values(), default=None)
        return found


def _all_leased(group: OpenGroup) -> bool:
    """Whether each missing sample was leased before, to any worker."""
    leased = {sample for given in group.given.values() for sample in given.samples}
    return leased.issuperset(group.lacks())


def _kept_min(rules: RunRules, task: TaskRules) -> int:
    """How many samples of a group of this task must be kept."""
    drawn = rules.drawn(task)
    missing = max(1, int(drawn * MISSING_SHARE))
    trained = rules.group_size if drawn > rules.group_size else rules.samples_min
    return max(drawn - missing, trained, KEPT_MIN)
