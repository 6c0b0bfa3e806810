"""What stands under docs/figures is what the tools make of it today, as far as that is cheap to see."""

from pathlib import Path

import pytest

from echo2d.bench.bubble import T_TRAIN_S, demand
from echo2d.core.capacity import mu_min
from tools import bubble_figure, cost_table
from tools.artefacts import cell, read, write


def test_tables_come_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "table.csv"
    assert read(path) == []
    write(path, [{"what": "a, b", "number": 1 / 3, "count": 7}])
    assert read(path) == [{"what": "a, b", "number": "0.33333", "count": "7"}]


def test_the_bubbles_are_those_of_formula_and_run() -> None:
    """The simulation is played for one of them."""
    points = [bubble_figure.measured(row) for row in read(bubble_figure.RUNS)]
    rows = read(bubble_figure.BUBBLES)
    assert 0 < len(rows) == len(points) <= len(bubble_figure.RATIOS) * len(bubble_figure.MODES)
    first = next(bubble_figure.compared(sorted(points, key=lambda one: (one.mode, one.mu_pool))[:1]))
    assert {name: str(cell(value)) for name, value in first.items()} == rows[0]
    assert all(point.periods >= 30 and point.max_staleness <= 4 for point in points)


def test_formula_simulation_and_run_agree_within_three_points() -> None:
    """In exclusive mode a run waits less: workers stop once a version's first root is there, after it was encoded."""
    for row in read(bubble_figure.BUBBLES):
        formula, simulated, measured = (float(row[name]) for name in ("formula", "simulated", "measured"))
        assert abs(formula - simulated) <= 0.03, row
        assert measured <= formula + 0.03, row
        assert row["mode"] == "exclusive" or formula <= measured + 0.03, row


def test_the_pool_is_set_for_the_ratio() -> None:
    needed = mu_min(demand("exclusive", T_TRAIN_S, bubble_figure.T_BCAST_S, 0.0, 15.0))
    assert needed is not None
    assert bubble_figure.pool("exclusive", 1.1) == pytest.approx(1.1 * needed)


def test_the_costs_are_the_means_of_the_runs() -> None:
    """All that is not planned: that takes seconds."""
    runs, rows = read(cost_table.RUNS), read(cost_table.COSTS)
    assert len(runs) == sum(int(row["runs"]) for row in rows)
    for row, (mix, system, out) in zip(rows, cost_table.cases(), strict=True):
        found = cost_table.means(runs, mix, system, out)
        assert {name: str(cell(value)) for name, value in found.items()} == {name: row[name] for name in found}


def test_the_cheapest_plan_is_as_it_was_planned() -> None:
    mix, system, out = next(cost_table.cases())
    assert str(cell(cost_table.planned(mix, system, out))) == read(cost_table.COSTS)[0]["planned_usd_per_step"]
