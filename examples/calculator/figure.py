"""Draw how often a run's versions answer held-out questions right, and how often they call the tool.

`python -m examples.calculator.figure RUN --out FIGURE.png` draws a run again, and writes the points beside
the figure as CSV.
"""

import argparse
import csv
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import matplotlib as mpl
from rich.table import Table

from echo2d.views.status import plain_console
from examples.calculator.held_out import HeldOutScore, read_scores

mpl.use("Agg")
import matplotlib.pyplot as plt

COLORS = {"right": "#1b6ca8", "called": "#d95f02"}
STYLES = {"sampled": "-", "greedy": ":"}
LABELS = {"right": "right answer", "called": "well-formed call"}


def print_result(scores: Sequence[HeldOutScore]) -> None:
    table = Table("held-out questions", "share", "first", "last", "gain", box=None)
    for name in STYLES:
        mine = [score for score in scores if score.name == name]
        for share, label in LABELS.items():
            first, last = getattr(mine[0], share), getattr(mine[-1], share)
            table.add_row(
                f"{name}, {mine[-1].questions} questions",
                label,
                f"{first:.3f} +- {mine[0].se(first):.3f}",
                f"{last:.3f} +- {mine[-1].se(last):.3f}",
                f"{last - first:+.3f}",
            )
    plain_console().print(table)


def draw(scores: Sequence[HeldOutScore], out: Path) -> None:
    """Write the figure and its points."""
    figure, panel = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for name, style in STYLES.items():
        mine = [score for score in scores if score.name == name]
        for share, label in LABELS.items():
            values = [getattr(score, share) for score in mine]
            panel.errorbar(
                [score.version for score in mine],
                values,
                [score.se(value) for score, value in zip(mine, values, strict=True)],
                color=COLORS[share],
                linestyle=style,
                marker="o",
                markersize=3,
                linewidth=1.2,
                elinewidth=0.7,
                label=f"{label}, {name}",
            )
    panel.set_xlabel("train steps")
    panel.set_ylabel("share of held-out questions")
    panel.set_ylim(0, 1.02)
    panel.grid(alpha=0.3)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False, fontsize=8, loc="lower right")
    figure.savefig(out, dpi=150)
    plt.close(figure)
    with out.with_suffix(".csv").open("w", newline="") as file:
        points = csv.DictWriter(file, list(asdict(scores[0])), lineterminator="\n")
        points.writeheader()
        points.writerows(asdict(score) for score in scores)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the held-out scores of a run.")
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    scores = read_scores(chosen.run)
    print_result(scores)
    draw(scores, chosen.out)


if __name__ == "__main__":
    main()
