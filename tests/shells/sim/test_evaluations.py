"""Evaluations beside a run with a new version every step: whole, of one version, and nearly free."""

from dataclasses import replace

import pytest

from echo2d.core.base.ids import RunId
from echo2d.core.rules.run import DisseminationTable, RunRules
from echo2d.core.rules.tasks import EpisodeRules, EvalRules, TaskRules
from echo2d_lab.faults import coordinator
from echo2d_lab.faults.engine import STOP, VOCAB
from echo2d_lab.faults.fault_schedule import Schedule, WorkerSpec
from echo2d_lab.faults.world import SimulatedRun

WORKERS, SLOTS, TOKEN_S, TOKENS_MAX = 3, 32, 0.1, 24
PER_STEP, GROUP, TRAIN_S, STEPS = 32, 4, 10.0, 24
ROWS = 200


def played(rng_seed: int, *evals: EvalRules) -> SimulatedRun:
    """S = 2, kappa = 1. An answer takes 1.25 s on average, a train step 10 s."""
    task = TaskRules(max_new_tokens=TOKENS_MAX, stop_token_ids=(STOP,))
    rules = RunRules(
        run_id=RunId("run-1"),
        staleness_max=2,
        publish_every=1,
        trajectories_per_step=PER_STEP,
        group_size=GROUP,
        tasks=(task,),
        vocab_size=VOCAB,
        over_stale="drop",
        filter_zero_variance=False,
        group_patience=0.0,
        evals=evals,
        dissemination=DisseminationTable(shape="auto", chains=1),
    )
    worker = WorkerSpec(SLOTS, 0.005, TOKEN_S, 0.0, 0.0, 0.0, "")
    run = SimulatedRun(
        Schedule(rng_seed, rules, (worker,) * WORKERS, (), STEPS * TRAIN_S, TRAIN_S, 4, 0.0)
    )
    run.run()
    return run


def bubble(run: SimulatedRun) -> float:
    found = run.coordinator.state.status().bubble_ratio
    assert found is not None
    return found


@pytest.mark.nightly
def test_twenty_evaluations_of_200_rows_cost_the_learner_less_than_a_point(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bubble differs by three points from seed to seed, so several runs are compared.

    Every group is trained whole, so that both runs wait for the same answers."""
    monkeypatch.setattr(coordinator, "ROWS", 1 << 30)  # no row comes twice
    held = TaskRules("held", max_new_tokens=TOKENS_MAX, stop_token_ids=(STOP,))
    rules = EvalRules(
        held,
        every=1,
        rows=ROWS,
        samples=1,
        hold_s=60.0,
        solved_at=1.0,
    )
    costs = []
    for rng_seed in range(6):
        run = played(rng_seed, rules)
        found = run.judge.ledger.evaluated
        assert len(found) >= 20
        assert [each.version for each in found] == list(range(len(found)))
        assert {(each.rows, each.of) for each in found} == {(ROWS, ROWS)}
        costs.append(bubble(run) - bubble(played(rng_seed)))
    assert sum(costs) / len(costs) <= 0.01, costs


@pytest.mark.nightly
def test_episodes_of_several_turns_are_played_whole_by_one_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker that has the newer version waits also while the environment answers, a second on average."""
    monkeypatch.setattr(coordinator, "ROWS", 1 << 30)
    held = TaskRules(
        "held",
        max_new_tokens=TOKENS_MAX,
        stop_token_ids=(STOP,),
        episode=EpisodeRules(
            turns_max=16,
            tokens_max=8192,
        ),
    )
    rules = EvalRules(
        held,
        every=1,
        rows=60,
        hold_s=60.0,
        samples=1,
        solved_at=1.0,
    )
    run = played(0, rules)
    found = run.judge.ledger.evaluated
    assert len(found) >= 20
    assert {(each.rows, each.of) for each in found} == {(60, 60)}
    # Of four rows one has one turn, one has two, and so on.
    assert run.judge.scored_episodes.turns >= len(found) * 60 * 1.5
    hasty = played(0, replace(rules, hold_s=0.1)).judge.ledger.evaluated
    assert any(0 < each.rows < each.of for each in hasty)


def test_a_score_names_its_number_of_answers_if_a_worker_may_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Answers of 25 s on average, and a worker waits with a newer version for 2 s."""
    monkeypatch.setattr(coordinator, "ROWS", 1 << 30)
    held = TaskRules("held", max_new_tokens=500, stop_token_ids=(STOP,))
    rules = EvalRules(
        held,
        every=1,
        rows=ROWS,
        hold_s=2.0,
        samples=1,
        solved_at=1.0,
    )
    partly = [each for each in played(0, rules).judge.ledger.evaluated if each.rows < each.of]
    assert len(partly) > 5
    assert all(each.rows > 0 for each in partly)
    patient = played(0, replace(rules, hold_s=60.0)).judge.ledger.evaluated
    assert sum(each.rows for each in patient) / len(patient) > sum(
        each.rows for each in partly
    ) / len(partly)
