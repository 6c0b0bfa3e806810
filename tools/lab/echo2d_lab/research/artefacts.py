"""Tables of numbers as CSV files under docs/figures, written row by row, so that long measurements are not repeated."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FIGURES = Path(__file__).parents[4] / "docs" / "figures"
DIGITS = 5  # of a number in a cell


def read(path: Path) -> list[dict[str, str]]:
    """The file's rows as text; without the file, no rows."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write all rows at once; if that fails, the old file stays."""
    path.parent.mkdir(exist_ok=True)
    spare = path.with_suffix(".part")
    with spare.open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows({name: cell(value) for name, value in row.items()} for row in rows)
    spare.replace(path)


def cell(value: object) -> object:
    """The text of a value in a file. Use it also for a value that is compared with a file's cells."""
    return f"{value:.{DIGITS}g}" if isinstance(value, float) else value
