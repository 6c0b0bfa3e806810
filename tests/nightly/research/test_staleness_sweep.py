"""The runs that the sweep plans, its continuation after a stop, and the table of its runs."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from echo2d_lab.research.staleness_figure import against, draw, fall, final, table
from echo2d_lab.research.staleness_sweep import (
    BEST,
    BOUNDS,
    CORRECTIONS,
    LONG_RUNS,
    SEEDS,
    Case,
    Run,
    cases,
    finished,
    kappas,
    long_cases,
)


def row(
    staleness: int, kappa: int, correction: str, seed: int, accuracies: list[float]
) -> dict[str, Any]:
    looks = [[6 * at, accuracy] for at, accuracy in enumerate(accuracies)]
    return {
        "staleness": staleness, "publish_every": kappa, "correction": correction, "seed": seed, "looks": looks,
        "ages": {str(staleness): 4}, "kl": 0.1, "cpu_s": 2.0,
    }  # fmt: skip


ROWS = [
    row(0, 1, "none", 0, [0.2, 0.3, 0.4, 0.5]),
    row(0, 1, "none", 1, [0.1, 0.2, 0.3, 0.4]),
    row(11, 1, "none", 0, [0.2, 0.3, 0.1, 0.1]),
    row(11, 1, "none", 1, [0.1, 0.2, 0.1, 0.2]),
    row(11, 1, BEST, 2, [0.2, 0.3, 0.3, 0.4]),
]


def test_every_case_is_planned_once() -> None:
    planned = list(cases())
    assert len(planned) == len(set(planned))
    table_of_all = {
        (s, k, c, seed) for s in BOUNDS for k in kappas(s) for c in ("none", BEST) for seed in SEEDS
    }
    hardest = {(11, 1, correction, seed) for correction in CORRECTIONS for seed in SEEDS}
    assert {
        (case.staleness, case.publish_every, case.correction, case.seed) for case in planned
    } == (table_of_all | hardest)
    assert [kappas(bound) for bound in BOUNDS] == [[1], [1], [1, 2], [1, 5], [1, 10]]


def test_every_long_case_has_its_runs_and_fresh_data_need_no_correction() -> None:
    """So plain clipped GRPO and the default are the same run where S = 0, and one is enough."""
    planned, rows = list(long_cases()), finished(LONG_RUNS)
    assert {(case.staleness, case.correction) for case in planned} == {
        *((bound, "default") for bound in BOUNDS),
        *((bound, "clip") for bound in BOUNDS[1:]),
    }
    run = [(row["staleness"], row["publish_every"], row["correction"], row["seed"]) for row in rows]
    assert sorted(run) == sorted(
        (case.staleness, case.publish_every, case.correction, case.seed) for case in planned
    )
    for row in rows:
        assert row["staleness"] or (row["corrected_share"] == 0.0 and row["ratio_max"] < 2.0)


def test_a_truncated_line_is_not_counted_as_a_run(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    assert finished(path) == []
    path.write_text(json.dumps(ROWS[0]) + "\n" + json.dumps(ROWS[1])[:40])
    assert finished(path) == [ROWS[0]]


def test_a_run_is_judged_by_its_end_and_by_its_worst_fall() -> None:
    assert final(ROWS[2]) == pytest.approx(0.1)
    assert fall(ROWS[2]) == pytest.approx(0.2)
    assert fall(ROWS[0]) == 0.0


def test_a_run_is_compared_with_the_synchronous_one_of_its_seed() -> None:
    found = against(ROWS)
    assert found[11, 1, "none"] == pytest.approx([-0.35, -0.2])
    assert (11, 1, BEST) not in found


def test_table_and_picture_show_the_runs_that_exist(tmp_path: Path) -> None:
    lines = {(line["S"], line["correction"]): line for line in table(ROWS)}
    worst = lines[11, "none"]
    assert (worst["runs"], worst["final"], worst["against_min"], worst["fall_max"]) == (
        2,
        0.125,
        -0.35,
        0.2,
    )
    assert lines[11, BEST]["against_synchronous"] == ""
    draw(ROWS, tmp_path)
    with (tmp_path / "staleness.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(lines)
    assert (tmp_path / "staleness.png").stat().st_size > 1000


@pytest.mark.parametrize(("staleness", "kappa"), [(0, 1), (4, 3)])
def test_a_run_of_the_sweep_trains_whole_groups(staleness: int, kappa: int) -> None:
    """Answers take no time there, so a group that waits for its last one must not go on without it."""
    played = Run(Case(staleness, kappa, BEST, 0), steps=3).train()
    assert len(played["looks"]) == 1
    assert sum(played["ages"].values()) == 3 * 128
