"""The loop buys the cheapest pool, and `plan` knows what it costs: eight drawn fleets and three files, played anew."""

from pathlib import Path

from echo2d_lab.research.pool_table import faults, names, run, table

FLEETS, PROCESSES = 8, 2


def test_the_loop_is_as_cheap_as_the_best_constant_pool(tmp_path: Path) -> None:
    fleets = names(FLEETS)
    found = list(table(run(tmp_path / "runs.csv", fleets, PROCESSES), fleets))
    assert faults(found) == []
    assert all(row["changes_a_period"] <= 0.1 for row in found)
