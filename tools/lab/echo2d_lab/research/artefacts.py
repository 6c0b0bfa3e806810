"""Tables of numbers as CSV files under docs/figures, a row at a time, so that what took long is not done again."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FIGURES = Path(__file__).parents[4] / "docs" / "figures"
DIGITS = 5  # that a number is written with


def read(path: Path) -> list[dict[str, str]]:
    """Its rows as text; none without the file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """All rows, or what was there stays."""
    path.parent.mkdir(exist_ok=True)
    spare = path.with_suffix(".part")
    with spare.open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows({name: cell(value) for name, value in row.items()} for row in rows)
    spare.replace(path)


def cell(value: object) -> object:
    """As it is written; what is compared with a file's cells goes through this first."""
    return f"{value:.{DIGITS}g}" if isinstance(value, float) else value
