"""How soon liars are convicted, over the share of answers about which they lie: docs/figures/liars.{csv,png}.

    python -m echo2d_lab.research.liars_figure [--run] [--shares 1,0.5,0.2,0.1,0.05] [--seconds 200]

`--run` first measures the shares that docs/figures/liars.csv lacks, each in one real run (`bench/liars`). Lies about
weights are left out: a worker has one set of weights for all its answers.
"""

import argparse
import csv
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from echo2d.demo.processes import Programs
from echo2d_lab.bench.liars.kinds import LieKind
from echo2d_lab.bench.liars.run import LiarsPlan, measure_liars

FIGURES = Path(__file__).parents[4] / "docs" / "figures"
LIES: tuple[LieKind, ...] = (
    "made_up",
    "made_up_true_logprobs",
    "greedy",
    "best_of_4",
    "temperature",
)


@dataclass(frozen=True, slots=True)
class LiarPoint:
    """A liar of one run: answers that it delivered, and those that were trained on, until its conviction or the end."""

    lie: str
    share: float
    delivered: int
    trained: int
    convicted: bool


def read_points(path: Path) -> list[LiarPoint]:
    if not path.exists():
        return []
    with path.open() as file:
        return [
            LiarPoint(
                row["lie"],
                float(row["share"]),
                int(row["delivered"]),
                int(row["trained"]),
                row["convicted"] == "True",
            )
            for row in csv.DictReader(file)
        ]


def write_points(path: Path, points: Sequence[LiarPoint]) -> None:
    names = ("lie", "share", "delivered", "trained", "convicted")
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(names)
        writer.writerows([getattr(point, name) for name in names] for point in points)


def run_share(share: float, seconds: float) -> list[LiarPoint]:
    plan = LiarsPlan(lies=LIES, share=share, seconds=seconds, steps=10_000)
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        with Programs(run / "logs") as programs:
            result = measure_liars(plan, run, programs, lambda _done, _words: None)
    for row in result.rows:
        if not row.lie and row.verdict:
            sys.stderr.write(f"{row.name} is convicted: {row.verdict}\n")
    return [
        LiarPoint(row.lie, share, row.delivered, row.trained, bool(row.verdict))
        for row in result.rows
        if row.lie
    ]


def draw(points: Sequence[LiarPoint], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for lie in LIES:
        of = sorted((each for each in points if each.lie == lie), key=lambda each: each.share)
        (line,) = axes.plot(
            [each.share for each in of],
            [each.delivered for each in of],
            marker="o",
            label=lie.replace("_", " "),
        )
        free = [each for each in of if not each.convicted]
        axes.plot(
            [each.share for each in free],
            [each.delivered for each in free],
            "x",
            color=line.get_color(),
            markersize=12,
            markeredgewidth=2,
        )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="share of its answers that the worker lies about",
        ylabel="answers delivered until it is convicted",
        title="5 % of clear workers' answers are audited; x: not convicted",
    )
    shares = sorted({each.share for each in points})
    axes.set_xticks(shares, [f"{share:.0%}" for share in shares])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", action="store_true")
    parser.add_argument("--shares", default="1,0.5,0.2,0.1,0.05")
    parser.add_argument("--seconds", type=float, default=200.0)
    options = parser.parse_args()
    table = FIGURES / "liars.csv"
    points = read_points(table)
    for share in map(float, options.shares.split(",")) if options.run else ():
        if share not in {each.share for each in points}:
            points += run_share(share, options.seconds)
            write_points(table, points)
    draw(points, FIGURES / "liars.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
