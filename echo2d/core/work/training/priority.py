"""Which of the buffered groups a step takes first, where `policy.order` is "priority".

    the last step of a group comes before another place is sure --> it is taken, the earliest first
    all others                                                  --> those whose rewards differ most first

The oldest groups first would lose none that can be saved. This order loses none either: for every step
to come, the groups that stay and would be too old after it, with all that are in flight, fit into the
places until then. So it orders only groups that have another step to live, and nothing where every
place is spoken for. A priority like DistRL's (arXiv 2410.14803) there ranks what is replayed by its
temporal difference error; the error of a reward against its group's mean is the advantage, so the
priority is the spread of a group's rewards (`contrast`). Nothing is replayed here (I4).
Not here: which groups fit into the step at all (`staleness`).
"""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from echo2d.core.base.ids import GroupId


class Fitting(NamedTuple):
    """A buffered group that the step can take. last_step: no later one can."""

    last_step: int
    priority: float
    group: GroupId


def by_priority(
    fitting: Sequence[Fitting], later: Collection[int], places: int, room: Callable[[int], int]
) -> list[GroupId]:
    """The groups for so many places of a step; fewer if there are no more.

    later: the last steps of buffered groups that only a later step can take. room(last_step): places of
    the steps after this one up to that one, less the groups in flight.
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
