"""Priority orders the buffer, and no group that an order by age would train gets too old."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2d.core.base.ids import GroupId
from echo2d.core.work.training.batch_order import Fitting, by_priority

Last = st.integers(0, 4)  # how many steps after this one a group can wait


def in_time(waiting: list[int], places: list[int]) -> bool:
    """Whether groups with these last steps all find a place, the earliest first, from the next step on."""
    due = Counter(waiting)
    ended = list(range(max(due, default=0) + 1))
    return all(sum(due[last] for last in ended[: at + 1]) <= sum(places[: at + 1]) for at in ended)


@given(
    fitting=st.lists(st.tuples(Last, st.floats(0, 1)), max_size=12),
    later=st.lists(st.integers(1, 4), max_size=3),
    arriving=st.lists(st.integers(1, 4), max_size=6),
    places=st.lists(st.integers(1, 4), min_size=5, max_size=5),
)
def test_priority_saves_every_group_that_an_order_by_age_saves(
    fitting: list[tuple[int, float]], later: list[int], arriving: list[int], places: list[int]
) -> None:
    """Steps are counted from this one, 0. arriving: last steps of groups that are in flight now."""
    groups = [Fitting(last, priority, GroupId(at)) for at, (last, priority) in enumerate(fitting)]

    def room(last: int) -> int:
        return sum(places[1 : last + 1]) - len(arriving)

    taken = by_priority(groups, later, places[0], room)
    assert len(set(taken)) == len(taken) == min(places[0], len(groups))

    def others_in_time(chosen: set[GroupId]) -> bool:
        stay = [each.last_step for each in groups if each.group not in chosen]
        return in_time([*stay, *later, *arriving], [0, *places[1:]])

    oldest = sorted(groups, key=lambda each: (each.last_step, each.group))[: places[0]]
    if others_in_time({each.group for each in oldest}):
        assert others_in_time(set(taken))


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=12).flatmap(
        lambda found: st.tuples(st.just(found), st.integers(1, len(found)))
    )
)
def test_the_highest_priorities_go_first_if_all_groups_can_wait(
    drawn: tuple[list[float], int],
) -> None:
    priorities, places = drawn
    groups = [Fitting(9, priority, GroupId(at)) for at, priority in enumerate(priorities)]
    taken = by_priority(groups, [], places, lambda last: 1000)
    assert [priorities[group] for group in taken] == sorted(priorities, reverse=True)[:places]


@pytest.mark.parametrize(("in_flight", "first"), [(0, [1]), (1, [0])])
def test_a_group_in_flight_has_its_place(in_flight: int, first: list[int]) -> None:
    """One place a step, and the dull group must be trained in the next step at the latest."""
    groups = [Fitting(1, 0.0, GroupId(0)), Fitting(2, 1.0, GroupId(1))]
    taken = by_priority(groups, [], 1, lambda last: last - in_flight)
    assert taken == first


def test_a_group_in_its_last_step_goes_first() -> None:
    groups = [Fitting(0, 0.0, GroupId(0)), Fitting(1, 1.0, GroupId(1)), Fitting(1, 2.0, GroupId(2))]
    assert by_priority(groups, [], 2, lambda last: last) == [0, 2]
