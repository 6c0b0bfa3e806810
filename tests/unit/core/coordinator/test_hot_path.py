"""What the coordinator does for each trajectory of a large fleet, counted in Python calls.

Seconds depend on what else the machine does; the load is that of `echo2d bench coordinator`.
"""

from cProfile import Profile

import pytest

from echo2d.core.cluster.rules import TaskRules
from tests.support.coordinator_world import rules
from tests.support.timed_fleet import TOKENS, TimedFleet

STATUS_CALLS_MAX = 66.0  # for each worker; 63 when this was written


def loaded(workers: int) -> TimedFleet:
    """A fleet in which every slot is leased, and batches, commits and versions follow each other."""
    task = TaskRules(max_new_tokens=TOKENS, stop_token_ids=(1,))
    step = 8 * (workers // 4)  # trajectories of a train step, in about ten seconds
    load = rules(
        tasks=(task,), group_size=8, trajectories_per_step=step, staleness_max=8, shape="auto"
    )
    fleet = TimedFleet(load, workers=workers, slots=4)
    fleet.play(20.0)
    return fleet


@pytest.mark.parametrize(("workers", "calls_max"), [(40, 2400.0), (160, 1920.0)])
def test_a_trajectory_stays_cheap_however_many_workers_there_are(
    workers: int, calls_max: float
) -> None:
    """2,328 and 1,855 Python calls when this was written, 3,629 and 3,529 before.

    In a small fleet more of them are for versions, whose plans are the same work for fewer trajectories.
    """
    fleet = loaded(workers)
    calls, accepted = fleet.calls, fleet.accepted
    fleet.play(20.0)
    assert fleet.accepted - accepted > 3 * workers
    assert (fleet.calls - calls) / (fleet.accepted - accepted) < calls_max
    fleet.state.check()


def test_a_status_stays_cheap() -> None:
    fleet, counted = loaded(100), Profile(builtins=False)
    counted.runcall(fleet.state.status)
    calls = sum(entry.callcount for entry in counted.getstats())
    assert calls / 100 < STATUS_CALLS_MAX
