"""The runs of `staleness_sweep` as a table and a picture: docs/figures/staleness.csv and .png.

final    accuracy over the last looks of a run: the mean probability of a right answer to the held-out prompts
against  final minus the final of the same seed's synchronous run without correction. Seeds differ more than outcomes,
         so this is the figure to read
fall     the largest fall of the accuracy below the best earlier value of the run: 0 if the accuracy only rises
"""

import csv
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

FIGURES = Path(__file__).parents[4] / "docs" / "figures"
LAST_LOOKS = 2
NAMES = {  # titles of the corrections
    "none": "none",
    "tis": "TIS",
    "icepop": "IcePop",
    "sequence_mask": "sequence mask",
    "loglinear": "log-linear",
    "clip": "PPO clip",
    "clip_tis": "clip + TIS",  # the default
}
Rows = Sequence[Mapping[str, Any]]
Setting = tuple[int, int, str]  # S, kappa, correction


def final(row: Mapping[str, Any]) -> float:
    return fmean(accuracy for _, accuracy in row["looks"][-LAST_LOOKS:])


def fall(row: Mapping[str, Any]) -> float:
    seen: list[float] = [accuracy for _, accuracy in row["looks"]]
    return max(best - now for best, now in zip(accumulate(seen, max), seen, strict=True))


def against(rows: Rows) -> dict[Setting, list[float]]:
    """`against` by setting, for the seeds whose synchronous run exists."""
    synchronous = {row["seed"]: final(row) for row in rows if setting_of(row) == (0, 1, "none")}
    found: dict[Setting, list[float]] = defaultdict(list)
    for row in rows:
        if row["seed"] in synchronous:
            found[setting_of(row)].append(final(row) - synchronous[row["seed"]])
    return found


def setting_of(row: Mapping[str, Any]) -> Setting:
    return row["staleness"], row["publish_every"], row["correction"]


def table(rows: Rows) -> Iterator[dict[str, object]]:
    """One line per setting; the spread is the standard deviation over seeds."""
    apart = against(rows)
    for setting in sorted({setting_of(row) for row in rows}):
        mine = [row for row in rows if setting_of(row) == setting]
        finals, falls, deltas = (
            [final(row) for row in mine],
            [fall(row) for row in mine],
            apart.get(setting, []),
        )
        yield {
            "S": setting[0],
            "kappa": setting[1],
            "correction": setting[2],
            "runs": len(mine),
            "staleness_mean": round(_mean_age(mine), 2),
            "start": round(fmean(row["looks"][0][1] for row in mine), 3),
            "final": round(fmean(finals), 3),
            "final_spread": _spread(finals),
            "against_synchronous": round(fmean(deltas), 3) if deltas else "",
            "against_min": round(min(deltas), 3) if deltas else "",
            "against_max": round(max(deltas), 3) if deltas else "",
            "fall": round(fmean(falls), 3),
            "fall_min": round(min(falls), 3),
            "fall_max": round(max(falls), 3),
            "kl": round(fmean(row["kl"] for row in mine), 4),
            "cpu_s_max": max(row["cpu_s"] for row in mine),
        }


def _spread(values: Sequence[float]) -> float | str:
    return round(stdev(values), 3) if len(values) > 1 else ""


def _mean_age(rows: Rows) -> float:
    ages: list[tuple[int, int]] = [
        (int(age), count) for row in rows for age, count in row["ages"].items()
    ]
    return sum(age * count for age, count in ages) / sum(count for _, count in ages)


def draw(rows: Rows, folder: Path) -> None:
    """Draw the pictures for the existing runs."""
    lines = list(table(rows))
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "staleness.csv").open("w", newline="", encoding="utf-8") as file:
        written = csv.DictWriter(file, list(lines[0]))
        written.writeheader()
        written.writerows(lines)
    _picture(lines, folder / "staleness.png")


def _picture(lines: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw one picture. Its text can be read if a page shows it 800 pixels wide."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 3.9), layout="constrained")
    outcome, stability, side = figure.subplots(1, 3)
    compared = [
        line
        for line in lines
        if (line["S"], line["kappa"]) == (11, 1) and line["against_min"] != ""
    ]
    swept = {line["correction"] for line in lines if line["S"] == 0}
    for correction, colour in zip(sorted(swept), ("#2f6db5", "#b5403c"), strict=False):
        for with_kappa, style in ((False, "o-"), (True, "s--")):
            of = [
                line
                for line in lines
                if line["correction"] == correction and line["against_min"] != ""
            ]
            of = [line for line in of if line["S"] < 3 or (line["kappa"] > 1) == with_kappa]
            label = f"{NAMES[correction]}, kappa = {'S - 1' if with_kappa else 1}"
            looks = {"fmt": style, "color": colour, "capsize": 3, "label": label}
            for axes, value, ends in (
                (outcome, "against_synchronous", ("against_min", "against_max")),
                (stability, "fall", ("fall_min", "fall_max")),
            ):
                means = [line[value] for line in of]
                spread = [
                    [abs(line[end] - mean) for line, mean in zip(of, means, strict=True)]
                    for end in ends
                ]
                axes.errorbar([line["S"] for line in of], means, spread, **looks)
    outcome.set_title("final accuracy minus that\nof S = 0, same seed")
    stability.set_title("largest fall of the accuracy\nin a run")
    for axes in (outcome, stability):
        axes.set(xlabel="staleness bound S", xticks=sorted({line["S"] for line in lines}))
        axes.axhline(0.0, color="#888888", linewidth=0.8)
        axes.grid(alpha=0.3)
    outcome.legend(fontsize=9, loc="lower left")
    compared.sort(key=lambda line: line["final"])
    names, finals = (
        [NAMES[line["correction"]] for line in compared],
        [line["final"] for line in compared],
    )
    side.barh(
        names,
        finals,
        xerr=[line["final_spread"] or 0.0 for line in compared],
        capsize=3,
        color="#2d8a57",
    )
    side.axvline(
        fmean(line["start"] for line in compared) if compared else 0.0,
        color="#888888",
        linestyle="--",
    )
    side.set_title("final accuracy, S = 11,\nkappa = 1 (dashed: start)")
    figure.savefig(path, dpi=150)
