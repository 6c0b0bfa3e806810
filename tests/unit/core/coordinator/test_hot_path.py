"""The coordinator's work for a large fleet grows no faster than the fleet, counted in Python calls.

Seconds depend on the machine's other work, and calls on the version of Python, so a large fleet is compared with a
small one. The load is that of `echo2d bench coordinator`, which measures the cost of a trajectory.
"""

from cProfile import Profile

import pytest

from echo2d.core.rules.tasks import TaskRules
from tests.support.coordinator_world import rules
from tests.support.timed_fleet import TOKENS, TimedFleet

SMALL, LARGE = 20, 80  # workers
# Of the calls for one trajectory, or for one worker in a status: in a large fleet as many at most. It has fewer,
# because a plan or a status does some work once for more of them: 0.87 and 0.86 when this was written.
CALLS_RATIO_MAX = 0.95


@pytest.fixture(scope="module")
def fleets() -> tuple[TimedFleet, TimedFleet]:
    """In both every slot is leased, and batches, commits and versions follow each other."""
    return loaded(SMALL), loaded(LARGE)


def loaded(workers: int) -> TimedFleet:
    task = TaskRules(max_new_tokens=TOKENS, stop_token_ids=(1,))
    step = 8 * (workers // 4)  # trajectories of a train step, in about ten seconds
    load = rules(
        tasks=(task,), group_size=8, trajectories_per_step=step, staleness_max=8, shape="auto"
    )
    fleet = TimedFleet(load, workers=workers, slots=4)
    fleet.play(20.0)
    return fleet


def test_a_status_stays_cheap_in_a_large_fleet(fleets: tuple[TimedFleet, TimedFleet]) -> None:
    small, large = map(calls_of_a_status, fleets)
    assert large / LARGE < CALLS_RATIO_MAX * small / SMALL


def calls_of_a_status(fleet: TimedFleet) -> int:
    counted = Profile(builtins=False)
    counted.runcall(fleet.state.status)
    return sum(entry.callcount for entry in counted.getstats())


def test_a_trajectory_stays_cheap_in_a_large_fleet(fleets: tuple[TimedFleet, TimedFleet]) -> None:
    small, large = map(calls_of_a_trajectory, fleets)
    assert large < CALLS_RATIO_MAX * small


def calls_of_a_trajectory(fleet: TimedFleet) -> float:
    calls, accepted = fleet.calls, fleet.accepted
    fleet.play(20.0)
    taken = fleet.accepted - accepted
    assert taken > 3 * len(fleet.peers)
    fleet.state.check()
    return (fleet.calls - calls) / taken
