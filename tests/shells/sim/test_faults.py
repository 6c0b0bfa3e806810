"""Whole runs under fault schedules: the invariants hold under every fault, and the run goes on afterwards.

A failing schedule names its rng_seed; that seed is added to FOUND before the defect is repaired. `make test` plays the
first seeds of each kind, `make nightly-faults` all of them and five thousand more, a block of them per test:
`--soak-from N` continues where an earlier soak ended.
"""

from dataclasses import replace
from typing import Any, Literal

import pytest

from echo2d.core.rules.audit import AuditRules
from echo2d.core.rules.tasks import EpisodeRules, Informative
from echo2d_lab.faults.fault_schedule import LEARNT, RunFault, Schedule, with_hoarders
from echo2d_lab.faults.world import RunOutcome, RunStuckError, SimulatedRun
from tests.support.coordinator_world import rules

FOUND = {
    36: "with `mask`, a last result made a group whole and too old, and it went on holding its place",
    178: "a worker whose engine hangs was given the next group as soon as it gave the last one back",
    260: "a refit read a slot while the next version was written into it: the same version stood in both",
    426: "after a restart of the coordinator half of the peers took its new plan for an old one",
    520: "the same, with every worker waiting for ever",
    20169: "three refits in a row failed, and the only worker never tried again",
    22947: "the order to encode went to a session that was over, and the seed's next one got none",
    23048: "a second learner read its newest checkpoint, and the first one made two more before it was fenced",
    60034: "memory that is not the snapshot counted as served when the next refit was refused",
    1330: "a group was buffered with a good verdict, while the bad one of another sample was under way",
    1001: "answers of a trusted worker from before a restart waited for limits that only it could teach",
    201077: "a returned sample was leased when it had waited for long enough, and then waited without end",
    4593: "an episode was forgotten in the turn that asked its environment, and the witness called that an old turn",
    31067: "a lone sample went back and forth between two workers that hang, while a proven one was idle",
    3985: "what a worker came to serve between its hello and the welcome was never told",
}

# The same, with workers that offer much and deliver little.
FOUND_WITH_HOARDERS = {
    41525: "a peer dropped a form, and its parent still took it for one that holds the frames",
    45401: "the judge took a guess at a lease, of which its worker had not been told, for one that is nobody's",
    47284: "the judge read a lease by turns that were forgotten after it was given",
}


def seeds(numbers: range, *, quick: int) -> list[Any]:
    """quick: how many of them are played at every commit; the others are a part of the night."""
    later = [pytest.param(each, marks=pytest.mark.nightly) for each in numbers[quick:]]
    return [*numbers[:quick], *later]


def play(rng_seed: int) -> RunOutcome:
    return SimulatedRun(Schedule.draw(rng_seed)).run()


@pytest.mark.parametrize("rng_seed", seeds(range(300), quick=36))
def test_the_run_survives(rng_seed: int) -> None:
    play(rng_seed)


@pytest.mark.parametrize("rng_seed", seeds(range(2000, 2040), quick=8))
def test_the_run_survives_exclusive_broadcasts(rng_seed: int) -> None:
    """Workers stand still for each version: none may do so for ever."""
    schedule = Schedule.draw(rng_seed)
    SimulatedRun(replace(schedule, rules=rules(schedule.rules, mode="exclusive"))).run()


@pytest.mark.parametrize("rng_seed", seeds(range(5000, 5020), quick=6))
def test_the_run_survives_plans_with_few_copies_of_the_seed(rng_seed: int) -> None:
    """Its bytes cost money, so plans follow the slack that is measured between the faults."""
    schedule = Schedule.draw(rng_seed)
    priced = rules(schedule.rules, seed_usd_per_gb_up=0.09, shape="auto")
    SimulatedRun(replace(schedule, rules=priced)).run()


@pytest.mark.parametrize("rng_seed", seeds(range(7000, 7060), quick=10))
def test_the_run_survives_pairs_informative_rows_and_priorities(rng_seed: int) -> None:
    """Two of three at a time."""
    schedule = Schedule.draw(rng_seed)
    first, *others = schedule.rules.tasks
    if rng_seed % 3 != 0:
        first = replace(first, pairs=True)
    if rng_seed % 3 != 1:
        first = replace(first, row_filter=Informative(0.0 if rng_seed % 2 else 0.1))
    order: Literal["oldest", "priority"] = "priority" if rng_seed % 3 != 2 else "oldest"
    rules = replace(schedule.rules, tasks=(first, *others), order=order)
    SimulatedRun(replace(schedule, rules=rules)).run()


@pytest.mark.parametrize("rng_seed", seeds(range(9000, 9200), quick=12))
def test_the_run_survives_workers_that_offer_much_and_deliver_little(rng_seed: int) -> None:
    SimulatedRun(with_hoarders(Schedule.draw(rng_seed))).run()


@pytest.mark.parametrize("rng_seed", seeds(range(9200, 9300), quick=8))
def test_hoarders_cost_the_others_at_most_a_tenth(rng_seed: int) -> None:
    """I6: without faults the others train nearly as many steps as they would alone."""
    drawn = Schedule.draw(rng_seed)
    good = replace(drawn.workers[0], slots=6, token_s=0.1, faulty=0.0)
    task = replace(drawn.rules.tasks[0], max_new_tokens=24, row_filter=None, episode=None)
    rules = replace(drawn.rules, tasks=(task,), evals=(), filter_zero_variance=False, audit=None)
    alone = replace(
        drawn, rules=rules, workers=(good, good), faults=(), refusals=0.0, heal_s=30.0, train_s=0.3
    )
    steps = [steps_in(each, 60.0, 360.0) for each in (alone, with_hoarders(alone))]
    assert steps[1] >= 0.9 * steps[0], steps


def steps_in(schedule: Schedule, begin: float, end: float) -> int:
    """Those between two times, of which the first is half a minute after the last worker came, or changed."""
    found = []
    for until in (begin, end):
        run = SimulatedRun(schedule)
        run.play(until)
        found.append(run.judge.newest_step)
    return found[1] - found[0]


def with_liars(schedule: Schedule) -> Schedule:
    """All tasks are environments, and all workers but two lie; only an audit can recognise that."""
    audit = AuditRules(newcomer=3, share=0.1, wait_s=20.0, trusted=("t",))
    tasks = [
        replace(
            task,
            episode=EpisodeRules(
                turns_max=16,
                tokens_max=8192,
            ),
        )
        for task in schedule.rules.tasks
    ]
    first, *others = schedule.workers
    liars = [replace(each, bad="lies", lies=1.0, slots=max(1, each.slots)) for each in others]
    return replace(
        schedule,
        rules=replace(schedule.rules, audit=audit, tasks=tuple(tasks)),
        workers=(first, replace(first, slots=2), *liars),
        learnt=LEARNT,
    )


def test_liars_in_environments_are_convicted_and_honest_workers_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("echo2d_lab.faults.worker.INVENTED", 1.0)
    convicted = 0
    for rng_seed in range(8000, 8020):
        run = SimulatedRun(with_liars(Schedule.draw(rng_seed)))
        run.run()
        convicted += len(run.judge.convicted)
    assert convicted >= 8


@pytest.mark.parametrize("rng_seed", FOUND)
def test_schedules_that_once_failed_pass(rng_seed: int) -> None:
    play(rng_seed)


@pytest.mark.parametrize("rng_seed", FOUND_WITH_HOARDERS)
def test_schedules_that_once_failed_beside_hoarders_pass(rng_seed: int) -> None:
    SimulatedRun(with_hoarders(Schedule.draw(rng_seed))).run()


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("block", range(50))
def test_the_run_survives_five_thousand_schedules(block: int, soak_from: int) -> None:
    for rng_seed in range(soak_from + 100 * block, soak_from + 100 * (block + 1)):
        play(rng_seed)


def test_unfinished_samples_are_handed_over_in_many_schedules() -> None:
    """Or the judge would have nothing to say about it."""
    outcomes = [play(rng_seed) for rng_seed in range(1000, 1030)]
    assert sum(outcome.handed_over > 0 for outcome in outcomes) >= 8
    assert sum(outcome.joined > 0 for outcome in outcomes) >= 8
    assert sum(outcome.outlived > 0 for outcome in outcomes) >= 4


def test_versions_spread_as_deltas_and_workers_without_the_base_catch_up() -> None:
    loops = [SimulatedRun(Schedule.draw(rng_seed)) for rng_seed in range(1000, 1030)]
    for loop in loops:
        loop.run()
    for kind in ("delta", "full", "delta aside", "full aside"):
        assert sum(loop.judge.forms[kind] > 0 for loop in loops) >= 3, kind


def test_every_kind_of_fault_is_drawn() -> None:
    kinds = {fault.kind for rng_seed in range(300) for fault in Schedule.draw(rng_seed).faults}
    assert len(kinds) == 21


def test_a_run_that_cannot_go_on_names_its_seed() -> None:
    schedule = Schedule.draw(7)
    workers = tuple(replace(spec, slots=0) for spec in schedule.workers)
    with pytest.raises(RunStuckError) as caught:
        SimulatedRun(replace(schedule, workers=workers)).run()
    assert "rng_seed=7" in caught.value.__notes__[0]


def test_no_learner_begins_again_without_faults() -> None:
    quiet = replace(Schedule.draw(7), faults=(), refusals=0.0)
    outcome = SimulatedRun(quiet).run()
    assert outcome.epochs == 1
    assert outcome.after_s < 60
    struck = replace(quiet, faults=(RunFault(5.0, "kill_learner", 1, 1.0),))
    assert SimulatedRun(struck).run().epochs == 2
