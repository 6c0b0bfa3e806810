"""The results of a demo, and the promises that they break."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from echo2d.demo.live_view import kills_table, progress_line
from echo2d.demo.results import (
    DemoResult,
    Kill,
    Quantiles,
    Trajectories,
    WorkerEnd,
    add_up,
    bubble_ratio,
    read_metrics,
    staleness_histogram,
    tenth,
    trained_again,
)
from echo2d.views.status import bar, spark

GOOD = DemoResult(
    steps=80,
    accuracy_first=0.5,
    accuracy_last=0.8,
    reward_first=0.3,
    reward_last=0.6,
    max_staleness=2,
    staleness_bound=2,
    staleness_histogram={0: 80, 1: 10, 2: 10},
    bubble_ratio=0.1,
    t_train_s=0.2,
    t_bcast_s=Quantiles.of([0.1, 0.2]),
    refit_pause_s=Quantiles.of([]),
    tokens_per_s=1000.0,
    seed_copies=1.0,
    wire_bytes=10,
    full_bytes=20,
    trajectories=Trajectories(trained=100, dropped=3),
    versions_published=81,
    wall_s=30.0,
    workers=(WorkerEnd("a", 80, digest_ok=True),),
)


def row(step: int, **facts: Any) -> dict[str, Any]:
    return {
        "step": step,
        "reward_mean": step / 10,
        "staleness": {"0": 1, "2": 3},
        "t_train_s": 3.0,
        "wait_s": 1.0,
        **facts,
    }


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, ""),
        ({"accuracy_last": 0.6}, "rose by 0.100"),
        ({"max_staleness": 3}, "a trajectory of staleness 3"),
        ({"staleness_histogram": {0: 95, 1: 5}}, "only 5 of 100"),
        ({"seed_copies": 2.0}, "2.00 copies"),
        ({"workers": (WorkerEnd("late", 79, digest_ok=True),)}, "late"),
        ({"workers": (WorkerEnd("wrong", 80, digest_ok=False),)}, "wrong"),
        ({"workers": ()}, "not on version 80"),
        ({"steps_again": 7, "batches_changed": 1}, "1 steps were trained again on another batch"),
        ({"kills": (Kill("worker", "worker-2", 9, 3.0, None),)}, "never came back: worker-2"),
    ],
)
def test_each_broken_promise_is_named(change: dict[str, Any], words: str) -> None:
    broken = dataclasses.replace(GOOD, **change).broken_promises(judge_accuracy=True)
    assert len(broken) == bool(words)
    assert words in "".join(broken)


def test_accuracy_may_rise_less_if_processes_are_killed() -> None:
    killed = dataclasses.replace(GOOD, kills=(Kill("seed", "seed", 9, 3.0, 1.5),))
    assert (
        dataclasses.replace(killed, accuracy_last=0.61).broken_promises(judge_accuracy=True) == []
    )
    assert (
        len(dataclasses.replace(killed, accuracy_last=0.59).broken_promises(judge_accuracy=True))
        == 1
    )


def test_a_demo_of_fewer_steps_is_not_judged_by_accuracy() -> None:
    short = dataclasses.replace(GOOD, accuracy_last=0.4, staleness_histogram={0: 100})
    assert short.broken_promises(judge_accuracy=False) == []


def test_on_policy_runs_need_no_overlap() -> None:
    sync = dataclasses.replace(
        GOOD, staleness_bound=0, max_staleness=0, staleness_histogram={0: 100}
    )
    assert sync.broken_promises(judge_accuracy=True) == []


def test_the_last_row_of_a_step_counts_and_half_a_row_does_not(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == []
    rows = [row(1), row(2, reward_mean=0.9), row(2)]
    path.write_text("".join(json.dumps(each) + "\n" for each in rows) + '{"step": 3, "rew')
    assert read_metrics(path) == [rows[0], rows[2]]


def test_steps_that_were_trained_again_are_counted() -> None:
    rows = [
        row(1, batch="a"),
        row(2, batch="b"),
        row(3, batch="c"),
        row(2, batch="b"),
        row(3, batch="x"),
    ]
    assert trained_again(rows) == (2, 1)


def test_a_coordinator_counts_from_0_at_every_start() -> None:
    life: dict[str, Any] = {
        "versions_published": 2,
        "wire_bytes": 10,
        "full_bytes": 20,
        "t_bcast_s": [0.1],
        "refit_pause_s": [],
        "trajectories": {"trained": 8, "dropped": 1},
        "seed_copies": {"1": 1.0},
        "workers": ["before"],
    }
    total = add_up([life, {**life, "seed_copies": {"2": 0.5}, "workers": ["now"]}])
    assert (total["versions_published"], total["full_bytes"], total["t_bcast_s"]) == (
        4,
        40,
        [0.1, 0.1],
    )
    assert total["trajectories"] == {"trained": 16, "dropped": 2}
    assert total["seed_copies"] == {"1": 1.0, "2": 0.5}
    assert total["workers"] == ["now"]


def test_the_figures_are_computed_from_the_rows_of_a_run() -> None:
    rows = [row(step) for step in range(1, 21)]
    rows[0]["wait_s"] = 100.0
    assert staleness_histogram(rows) == {0: 20, 2: 60}
    assert bubble_ratio(rows) == pytest.approx(0.25), "start-up does not count"
    assert bubble_ratio(rows[:1]) == 0.0
    assert tenth(rows, last=False) == pytest.approx(0.15)
    assert tenth(rows, last=True) == pytest.approx(1.95)
    assert progress_line(rows, steps=80, tokens_per_s=1234.5).startswith("step 20/80  reward 2.000")


def test_bars_and_sparklines_are_drawn() -> None:
    assert bar(1, 2, 4) == "██░░"
    assert bar(9, 2, 4) == "████"
    assert bar(1, 0, 2) == "░░"
    assert spark([0.0, 0.5, 1.0]) == "▁▅█"
    assert spark([]) == ""


def test_the_table_of_kills_has_a_row_for_each_kind() -> None:
    kills = [
        Kill("worker", f"worker-{number}", 5, 1.0, wait) for number, wait in enumerate((2.04, None))
    ]
    assert [list(column.cells) for column in kills_table(kills).columns] == [
        ["worker"],
        ["2"],
        ["2.0, never"],
    ]


def test_the_result_is_one_json_object() -> None:
    assert json.loads(json.dumps(GOOD.as_dict()))["workers"] == [
        {"id": "a", "version": 80, "digest_ok": True}
    ]
