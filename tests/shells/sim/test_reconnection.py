"""The coordinator dies and restarts in the middle of a run, without another fault: what that costs."""

from dataclasses import replace

import pytest

from echo2d.core.base.ids import LeaseId
from echo2d.core.protocol.control_messages import LeaseGranted, VersionKey
from echo2d_lab.faults.engine import SimEngine
from echo2d_lab.faults.fault_schedule import FaultKind, RunFault, Schedule
from echo2d_lab.faults.world import SimulatedRun


def struck(rng_seed: int, kind: FaultKind, *at_s: float, staleness_max: int = 4) -> SimulatedRun:
    """A run of good workers in which only this happens."""
    drawn = Schedule.draw(rng_seed)
    workers = [replace(drawn.workers[0], slots=4, token_s=0.1, faulty=0.0) for _ in range(3)]
    faults = tuple(RunFault(at, kind, 1, 1.0) for at in at_s)
    rules = replace(
        drawn.rules,
        staleness_max=staleness_max,
        publish_every=1,
        tasks=(replace(drawn.rules.tasks[0], max_new_tokens=24, episode=None),),
        group_patience=0.0,
        # Their leases end with the coordinator.
        evals=(),
        over_stale="drop",
    )
    return SimulatedRun(
        replace(
            drawn,
            workers=tuple(workers),
            faults=faults,
            rules=rules,
            refusals=0.0,
            heal_s=max(at_s) + 10.0,
            train_s=2.0,
        )
    )


AGAIN = (4, 6, 11, 19)


@pytest.mark.parametrize("rng_seed", sorted({*range(5), *AGAIN}))
def test_workers_carry_on_and_generate_nothing_twice(
    rng_seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was under way when the coordinator died is accepted from the attempt that began it.

    Only what it had written down and not said yet is leased again (AGAIN): nobody had begun it.
    """
    begun: set[tuple[LeaseId, int]] = set()
    aborted: list[LeaseId] = []
    start = SimEngine.start

    def started(engine: SimEngine, lease: LeaseGranted) -> None:
        begun.add((lease.lease, lease.attempt))
        start(engine, lease)

    monkeypatch.setattr(SimEngine, "start", started)
    monkeypatch.setattr(SimEngine, "abort", lambda self, lease, attempt: aborted.append(lease))
    loop = struck(
        rng_seed, "kill_coordinator", 12.0, 19.0, 26.0, 33.0, staleness_max=20
    )  # so that none ages out
    outcome = loop.run()
    assert outcome.epochs == 1, "the learner took it for a pause"
    assert outcome.outlived >= 4
    assert aborted == []
    again = [each for each in loop.judge.ledger.given.values() if each.attempt]
    assert bool(again) == (rng_seed in AGAIN)
    assert not any((each.lease, each.attempt - 1) in begun for each in again)


@pytest.mark.parametrize("kind", ["kill_coordinator", "kill_in_commit"])
def test_versions_that_were_spreading_arrive_after_the_restart(kind: FaultKind) -> None:
    """Struck at many moments of a broadcast: workers have what was sent, plans are made anew."""
    for fifth in range(5):
        loop = struck(3, kind, *(12.0 + fifth / 5 + 4 * n for n in range(5)))
        outcome = loop.run()
        newest = max(loop.judge.ledger.published.values(), key=lambda record: record.publish_seq)
        behind = VersionKey(newest.version, newest.digest)
        versions = [worker.state.serving for worker in loop.workers]
        assert all(
            serving is not None and serving.version >= behind.version - 2 for serving in versions
        )
        assert outcome.epochs == 1
