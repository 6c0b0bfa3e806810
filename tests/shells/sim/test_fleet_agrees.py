"""The fleet simulation compared with the full one: the same few workers, with every message, frame and engine."""

from collections import Counter

import pytest

from echo2d.core.base.ids import RunId
from echo2d.core.capacity.estimators import quantile
from echo2d.core.rules.run import DisseminationTable, RunRules
from echo2d.core.rules.tasks import TaskRules
from echo2d.plan.fleet.spec import read_fleet
from echo2d.plan.fleet.world import FleetWorld
from echo2d.plan.kernel.scenario import MBIT
from echo2d_lab.faults.engine import STOP, VOCAB
from echo2d_lab.faults.fault_schedule import Schedule, WorkerSpec
from echo2d_lab.faults.world import SimulatedRun

WORKERS, SLOTS, TOKEN_S, TOKENS_MAX = 3, 6, 0.1, 24
SAMPLE_S = TOKEN_S * (1 + TOKENS_MAX) / 2  # lengths are drawn uniformly
PER_STEP, GROUP, BOUND, SECONDS = 16, 2, 3, 240.0
DOWNLINK = 100 * MBIT  # makes T_bcast what it is there
REFIT_S = 0.3  # of the full simulation's engines, on average and nearly


def full(train_s: float) -> tuple[int, Counter[int], float]:
    """Steps committed, trained trajectories by staleness, and T_bcast of a publish that waited for no other."""
    task = TaskRules(max_new_tokens=TOKENS_MAX, stop_token_ids=(STOP,))
    rules = RunRules(
        run_id=RunId("run-1"),
        staleness_max=BOUND,
        publish_every=1,
        trajectories_per_step=PER_STEP,
        group_size=GROUP,
        tasks=(task,),
        vocab_size=VOCAB,
        over_stale="drop",
        filter_zero_variance=False,
        dissemination=DisseminationTable(shape="auto", chains=1),
    )
    worker = WorkerSpec(SLOTS, 0.005, TOKEN_S, 0.0, 0.0, 0.0, "")
    loop = SimulatedRun(Schedule(0, rules, (worker,) * WORKERS, (), SECONDS, train_s, 1, 0.0))
    loop.run()
    status = loop.coordinator.state.status()
    return (
        status.committed_step,
        Counter({int(each): count for each, count in status.staleness.items()}),
        (quantile(status.t_bcast_s, 0.25) or 0.0),
    )


def fast(train_s: float, t_bcast_s: float) -> tuple[int, Counter[int]]:
    """The same of the fleet simulation."""
    learner = {
        "t_train_s": train_s,
        "trajectories_per_step": PER_STEP,
        "staleness_max": BOUND,
        "publish_every": 1,
    }
    kind = {
        "name": "w",
        "count": WORKERS,
        "trajectories_per_h": 3600 * SLOTS / SAMPLE_S,
        "rtt_ms": 1,
    }
    document = {
        "learner": {**learner, "uplink_mbps": 1000},
        "model": {"params": DOWNLINK * max(0.01, t_bcast_s - REFIT_S) / 2},
        "fleet": [{**kind, "downlink_mbps": DOWNLINK / MBIT, "uplink_mbps": 1000}],
        "policy": {"t_gen_s": SAMPLE_S, "pause_s": REFIT_S, "gamma": 10.0},
        "simulate": {
            "hours": SECONDS / 3600,
            "group_size": GROUP,
            "gen_sigma": 0.55,
            "train_sigma": 0.3,
        },
    }
    world = FleetWorld(read_fleet(document))
    return world.run()["steps"], world.statistics.staleness


@pytest.mark.parametrize("train_s", [pytest.param(0.5, marks=pytest.mark.nightly), 3.0])
def test_steps_and_staleness_equal_those_of_the_full_simulation(train_s: float) -> None:
    """With too few workers (a step takes 1.1 s for their sake) and with more than enough."""
    steps, seen, t_bcast_s = full(train_s)
    fast_steps, fast_seen = fast(train_s, t_bcast_s)
    assert fast_steps == pytest.approx(steps, rel=0.1)
    for histogram in (seen, fast_seen):
        assert max(histogram) <= BOUND
    mean = sum(each * count for each, count in seen.items()) / seen.total()
    fast_mean = sum(each * count for each, count in fast_seen.items()) / fast_seen.total()
    assert fast_mean == pytest.approx(mean, abs=0.5)
