"""Draw the held-out accuracy of runs over steps and over wall time.

`python -m examples.math.figure RUN... --out FIGURE.png` draws several runs together, one color for each S, and
writes the points beside the figure as CSV.
"""

import argparse
import csv
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import matplotlib as mpl
from rich.table import Table

from echo2d.views.status import plain_console
from examples.one_machine import read_rows

mpl.use("Agg")
import matplotlib.pyplot as plt

COLORS = {0: "#d95f02", 3: "#1b6ca8"}
OTHER_COLOR = "#555555"
STYLES = {"sampled": "-", "greedy": ":"}


@dataclass(frozen=True, slots=True)
class Score:
    """One evaluation of a run. se: standard error of the mean. minutes: what the learner had worked
    and waited when it had made this version, while it ran.
    """

    staleness: int
    seed: int
    name: str
    version: int
    minutes: float
    mean: float
    se: float
    questions: int
    samples: int

    def __str__(self) -> str:
        return f"version {self.version:>3}  {self.name:<7}  {self.mean:.3f} +- {self.se:.3f}"


def read_scores(run: Path) -> list[Score]:
    """The scores of a run, oldest first. An evaluation without an answer is left out."""
    config = tomllib.loads((run / "run.toml").read_text())
    steps, found = read_rows(run)
    seconds, minutes = 0.0, {0: 0.0}
    for row in steps:
        seconds += row["t_train_s"] + row["wait_s"]
        minutes[row["step"]] = seconds / 60
    scores = {
        (name, each["version"]): Score(
            staleness=config["policy"]["staleness_max"],
            seed=config["learner"]["rng_seed"],
            name=name,
            version=each["version"],
            minutes=minutes[each["version"]],
            mean=each["mean"],
            se=each["se"],
            questions=each["rows"],
            samples=each["samples"],
        )
        for row in found
        for name, each in row["eval"].items()
        if each["mean"] is not None and each["version"] in minutes
    }
    return list(scores.values())


def print_result(scores: Sequence[Score]) -> None:
    table = Table("held-out sums", "version", "accuracy", "version", "accuracy", "gain", box=None)
    for name in STYLES:
        mine = [score for score in scores if score.name == name]
        if mine:
            first, last = mine[0], mine[-1]
            table.add_row(
                f"{name}, {last.questions} questions x {last.samples}",
                str(first.version),
                f"{first.mean:.3f} +- {first.se:.3f}",
                str(last.version),
                f"{last.mean:.3f} +- {last.se:.3f}",
                f"{last.mean - first.mean:+.3f}",
            )
    plain_console().print(table)


def draw(scores: Sequence[Score], out: Path) -> None:
    """Write the figure and its points."""
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    runs = sorted({(score.staleness, score.seed) for score in scores})
    for panel, over in zip(panels, ("version", "minutes"), strict=True):
        named = set[str]()
        for run in runs:
            for name, style in STYLES.items():
                mine = [s for s in scores if (s.staleness, s.seed, s.name) == (*run, name)]
                label = f"S = {run[0]}, {name}"
                panel.errorbar(
                    [getattr(score, over) for score in mine],
                    [score.mean for score in mine],
                    [score.se for score in mine],
                    color=COLORS.get(run[0], OTHER_COLOR),
                    linestyle=style,
                    marker="o",
                    markersize=3,
                    linewidth=1.2,
                    elinewidth=0.7,
                    label="_" if label in named else label,
                )
                named.add(label)
        panel.set_ylim(0, 1)
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_xlabel("train steps")
    panels[1].set_xlabel("minutes of wall time, two CPU cores")
    panels[0].set_ylabel("held-out accuracy")
    panels[1].legend(frameon=False, fontsize=8, loc="lower right")
    figure.savefig(out, dpi=150)
    plt.close(figure)
    with out.with_suffix(".csv").open("w", newline="") as file:
        points = csv.DictWriter(file, list(asdict(scores[0])), lineterminator="\n")
        points.writeheader()
        for score in scores:
            rounded = {
                name: round(x, 4) if isinstance(x, float) else x
                for name, x in asdict(score).items()
            }
            points.writerow(rounded)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the held-out accuracy of runs.")
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    scores = [score for run in chosen.runs for score in read_scores(run)]
    for run in chosen.runs:
        print(run)
        print_result(read_scores(run))
    draw(scores, chosen.out)


if __name__ == "__main__":
    main()
