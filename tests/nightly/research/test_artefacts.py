"""The files in docs/figures are what the tools make today, as far as a test can check that cheaply."""

from pathlib import Path
from statistics import median

import pytest

from echo2d_lab.bench.coordinator.bubble import KAPPA, PER_STEP, T_TRAIN_S
from echo2d_lab.research import bubble_figure, cost_table
from echo2d_lab.research.artefacts import cell, read, write


def test_a_table_that_is_read_equals_the_written_one(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "table.csv"
    assert read(path) == []
    write(path, [{"what": "a, b", "number": 1 / 3, "count": 7}])
    assert read(path) == [{"what": "a, b", "number": "0.33333", "count": "7"}]


def test_the_recorded_bubbles_equal_those_of_formula_and_run() -> None:
    """The simulation is played for one of them. Every ratio was measured, and the runs came near to it."""
    points = [bubble_figure.measured(row) for row in read(bubble_figure.RUNS)]
    rows = read(bubble_figure.BUBBLES)
    first = next(
        bubble_figure.compared(
            sorted(points, key=lambda one: (one.group_size, one.mode, one.mu_pool))[:1]
        )
    )
    assert {name: str(cell(value)) for name, value in first.items()} == rows[0]
    assert all(point.periods >= 30 and point.max_staleness <= 4 for point in points)
    for both, aimed_at in zip(bubble_figure.SIDE_BY_SIDE, bubble_figure.RATIOS, strict=True):
        for mode, size in both:
            mine = [row for row in rows if (row["mode"], row["group_size"]) == (mode, str(size))]
            ratios = [float(row["mu_pool_over_mu_min"]) for row in mine]
            assert ratios == pytest.approx(sorted(aimed_at), rel=0.02)


def test_formula_simulation_and_run_agree_within_three_points() -> None:
    """And with a tenth more than is needed the learner waits for less than two hundredths of its time."""
    for row in read(bubble_figure.BUBBLES):
        bubbles = [float(row[name]) for name in ("formula", "simulated", "measured")]
        assert max(bubbles) - min(bubbles) <= 0.03, row
        assert float(row["mu_pool_over_mu_min"]) < 1.05 or max(bubbles) <= 0.02, row


def test_measurements_set_the_pool_for_each_ratio() -> None:
    assert bubble_figure.pool("background", 1.1) == pytest.approx(1.1 * PER_STEP / T_TRAIN_S)
    needed = KAPPA * PER_STEP / (KAPPA * T_TRAIN_S - bubble_figure.STILL_S)
    assert bubble_figure.pool("exclusive", 1.1) == pytest.approx(1.1 * needed)
    known = [bubble_figure.measured(row) for row in read(bubble_figure.RUNS)]
    still_s = median(point.still_s for point in known if point.mode == "exclusive")
    needed = KAPPA * PER_STEP / (KAPPA * T_TRAIN_S - still_s)
    assert bubble_figure.pool("exclusive", 0.8, known) == pytest.approx(0.8 * needed)


def test_the_recorded_costs_are_the_means_of_the_runs() -> None:
    """All that is not planned: that takes seconds."""
    runs, rows = read(cost_table.RUNS), read(cost_table.COSTS)
    assert len(runs) == sum(int(row["runs"]) for row in rows)
    for row, (mix, system, out) in zip(rows, cost_table.cases(), strict=True):
        found = cost_table.means(runs, mix, system, out)
        assert {name: str(cell(value)) for name, value in found.items()} == {
            name: row[name] for name in found
        }


def test_the_cheapest_plan_equals_the_recorded_one() -> None:
    mix, system, out = next(cost_table.cases())
    assert (
        str(cell(cost_table.planned(mix, system, out)))
        == read(cost_table.COSTS)[0]["planned_usd_per_step"]
    )
