"""The control loop chooses the cheapest pool, and `plan` predicts its cost: drawn fleets of each family, and three
files.
"""

from pathlib import Path

from echo2d_lab.research.pool_table import faults, of_each_family, run, table

PROCESSES = 2


def test_the_control_loop_is_as_cheap_as_the_best_constant_pool(tmp_path: Path) -> None:
    fleets = of_each_family(2)
    assert faults(list(table(run(tmp_path / "runs.csv", fleets, PROCESSES), fleets))) == []
