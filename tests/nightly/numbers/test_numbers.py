"""`make nightly-numbers`: deterministic commands still give the numbers that the pages show.

Only numbers that are planned, simulated in virtual time, or computed from recorded runs; none that is timed. If a
number has changed, correct it in the page, with its date, and here; or the change of the code is wrong.

To add a number, add a row to a table below, or a table.
"""

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from echo2d.plan.fleet.spec import load_fleet
from echo2d_lab.research import staleness_figure, usd_to_accuracy
from echo2d_lab.research.staleness_sweep import LONG_RUNS, RUNS, finished
from tests.support.page_numbers import PageNumbers, missing, moved, page_text, run

PLAN = "echo2d plan scenarios/mix-rented.toml --set learner.publish_every=1 --set learner.staleness_max=0"
PLANNED = [
    PageNumbers(
        "when-not.md",
        "echo2d plan scenarios/mix-rented.toml --map break_even.png",
        "a data centre takes {12.304} usd a step ({17.453} if it generates and trains by turns): this is {23.8}% "
        "cheaper; rollouts are {50}% of its bill, and a trajectory here costs {0.49} times what it costs there; at "
        "this share, a run here is cheaper if a trajectory costs at most {0.96} times as much as there; at this price, "
        "if rollouts reach {6}% of the bill",
        (
            "break_even/centralized_usd_per_step",
            "break_even/synchronous_usd_per_step",
            "break_even/saving * 100",
            "break_even/rollout_share * 100",
            "break_even/price_ratio",
            "break_even/price_ratio_max",
            "break_even/rollout_share_min * 100",
        ),
    ),
    PageNumbers("when-not.md", PLAN, "says {20.6} usd a step with S = 0", ("usd_per_step",)),
    PageNumbers(
        "when-not.md",
        PLAN,
        "{10.4} with S = 1",
        ("usd_per_step",),
        more="--set learner.staleness_max=1",
    ),
    PageNumbers(
        "when-not.md",
        PLAN,
        "{9.4} with S = 2 and more",
        ("usd_per_step",),
        more="--set learner.staleness_max=2",
    ),
    PageNumbers(
        "when-not.md",
        PLAN,
        "(`--set policy.t_gen_s=1200`) S = 1 costs {15.9}",
        ("usd_per_step",),
        more="--set learner.staleness_max=1 --set policy.t_gen_s=1200",
    ),
]

FAT = "echo2d simulate scenarios/fat-seed.toml --json"
PAID = ("predicted_s", "seed_copies", "t_verify_s")
WITHIN = "within_s = 1000.0"
PEERS = "[[peers]]                   # the seed"
CRASH = {PEERS: f'[[faults]]\npeer = 5\nat = "5s"\n\n{PEERS}'}
MIXED = "echo2d simulate scenarios/mixed.toml --peers 256 --bytes 80MB --json"
SIZE = 'bytes = "1GiB"'
BOTH = ("ratio", "seed_copies")
STAR, CHAIN = ({SIZE: f'shape = "{shape}"\n{SIZE}'} for shape in ("star", "chain"))
SCALE = [
    PageNumbers(
        "scale.md",
        MIXED,
        "| star, 80 MB | {3.21}, {16.0} |",
        BOTH,
        more="--peers 16",
        changed=STAR,
    ),
    PageNumbers(
        "scale.md",
        MIXED,
        "| one chain, 80 MB | {2.54}, {1.0} |",
        BOTH,
        more="--peers 16",
        changed=CHAIN,
    ),
    PageNumbers(
        "scale.md",
        MIXED,
        "| planned (`auto`), 80 MB | {1.10}, {5.1} |",
        BOTH,
        more="--peers 16",
    ),
    PageNumbers(
        "scale.md",
        MIXED,
        "| planned (`auto`), 80 MB | 1.10, 5.1 | {1.25}, {6.0} |",
        BOTH,
        more="--peers 64",
    ),
    PageNumbers(
        "scale.md",
        MIXED,
        "| planned (`auto`), 80 MB | 1.10, 5.1 | 1.25, 6.0 | {1.27}, {6.0} |",
        BOTH,
    ),
    PageNumbers(
        "scale.md",
        MIXED,
        "| planned (`auto`), 1 GiB | {1.02}, {5.0} |",
        BOTH,
        more="--peers 16 --bytes 1GiB",
    ),
    PageNumbers(
        "scale.md",
        MIXED,
        "80 MB to 256 peers take {1.07} times the bound, at {1.00} copies.",
        BOTH,
        changed={'uplink = "1gbit"': 'uplink = "100mbit"'},
    ),
    PageNumbers(
        "benchmarks.md",
        "echo2d simulate scenarios/mixed.toml --peers 1000 --bytes 80MB --json",
        "a version of 80 MB reaches 1,000 peers in {1.31} times what any algorithm needs, while the seed sends {7} "
        "copies",
        BOTH,
    ),
]
BROADCAST = [
    PageNumbers(
        "broadcast.md",
        FAT,
        "| 0 s, or no price | {2.87} s | {6.81} | {3.09} s |",
        PAID,
        changed={WITHIN: "within_s = 0.0"},
    ),
    PageNumbers(
        "broadcast.md",
        FAT,
        "| 14 s | {13.5} s | {2.34} | {13.5} s |",
        PAID,
        changed={WITHIN: "within_s = 14.0"},
    ),
    PageNumbers("broadcast.md", FAT, "| 1,000 s | {16.4} s | {1.00} | {16.7} s |", PAID),
    PageNumbers(
        "broadcast.md",
        FAT,
        "| 1,000 s, a relay dies after 5 s | {16.4} s | {1.08} | {18.2} s |",
        PAID,
        changed=CRASH,
    ),
]

TOOLS = "echo2d simulate scenarios/tools.toml --json"
FLEETS = [
    PageNumbers(
        "measurements/episodes.md",
        TOOLS,
        "| slots that are leased (`slots_busy`) | {99.0} % | "
        "| episodes that wait for a tool (`episodes_parked`) | {539} | "
        "| turns at the worker of the last one, where no refit came between (`stayed`) | {97.7} % | "
        "| tokens of prompts that workers read, divided by those that they would read with an ideal cache "
        "(`prefill_ratio`) | {1.03} |",
        ("slots_busy * 100", "episodes_parked", "stayed * 100", "prefill_ratio"),
    ),
]


@pytest.mark.timeout(1800)  # a thousand peers on a busy machine
@pytest.mark.parametrize("row", [*PLANNED, *SCALE, *BROADCAST, *FLEETS], ids=str)
def test_a_number_of_a_command_has_not_moved(row: PageNumbers, tmp_path: Path) -> None:
    assert missing(row, page_text(row.page)) == []
    assert moved(row, run(row, tmp_path)) == []


# --- computed from recorded runs


@cache
def accuracies() -> dict[str, Any]:
    """What `usd_to_accuracy` computes, without playing or drawing anything: by correction, S and goal."""
    fleet = load_fleet(usd_to_accuracy.SCENARIO)
    usd = usd_to_accuracy.prices(fleet)
    rows = usd_to_accuracy.table(finished(LONG_RUNS), usd, usd_to_accuracy.references(fleet))
    return {f"{row['correction']} {row['S']} {row['goal']}": row for row in rows}


@cache
def sweep() -> dict[str, Any]:
    """The table of the short sweep: by S, kappa and correction."""
    rows = staleness_figure.table(finished(RUNS))
    return {f"{row['S']} {row['kappa']} {row['correction']}": row for row in rows}


@cache
def step_prices() -> dict[str, Any]:
    """Usd a step as recorded: by how long an answer takes, in the order of S."""
    fleet = load_fleet(usd_to_accuracy.SCENARIO)
    return {
        f"{answer_s:g}": list(usd_to_accuracy.prices(fleet, answer_s).values())
        for answer_s in usd_to_accuracy.ANSWERS_S
    }


ACCURACY, SWEEP = "python -m echo2d_lab.research.usd_to_accuracy", "make staleness-sweep"
PRICES = f"figures/usd_by_staleness.csv`, written by `{ACCURACY}"
COMPUTED: Mapping[str, Callable[[], dict[str, Any]]] = {
    ACCURACY: accuracies,
    SWEEP: sweep,
    PRICES: step_prices,
}


def cell(setting: str, name: str) -> tuple[str, str, str]:
    """A mean and its interval."""
    mean = f"{setting}/{name}"
    return mean, f"{mean}_low", f"{mean}_high"


def learner_row(bound: int, correction: str, text: str) -> PageNumbers:
    """One line of the table of docs/measurements/learner.md."""
    goals = [f"{correction} {bound} {goal}" for goal in usd_to_accuracy.GOALS]
    ratios = [path for goal in goals for path in cell(goal, "steps_ratio")]
    if bound == 11:  # too short for the last goal, so no interval
        del ratios[-2:]
    return PageNumbers(
        "measurements/learner.md", ACCURACY, text, (*cell(goals[-1], "gain"), *ratios)
    )


def capacity_row(bound: int, text: str) -> PageNumbers:
    """One line of the table of docs/measurements/capacity.md."""
    setting = f"default {bound} {usd_to_accuracy.GOAL}"
    names = ("steps_ratio", "over_asynchronous", "over_synchronous", "over_published")
    if bound in {0, 11}:  # of S = 0 itself, and too short: no interval
        reads = [f"{setting}/{name}" for name in names]
    else:
        reads = [path for name in names for path in cell(setting, name)]
    return PageNumbers(
        "measurements/capacity.md", ACCURACY, text, (f"{setting}/usd_per_step", *reads)
    )


RECORDED = [
    capacity_row(0, "| 0 | {20.83} | {1} | {1.69} | {1.19} | {1.78} |"),
    capacity_row(
        1,
        "| 1 | {10.50} | {0.94} ({0.86}-{1.01}) | {0.80} ({0.73}-{0.86}) | {0.56} ({0.52}-{0.61}) "
        "| {0.84} ({0.77}-{0.91}) |",
    ),
    capacity_row(
        3,
        "| 3 | {9.50} | {0.96} ({0.92}-{0.99}) | {0.74} ({0.71}-{0.77}) | {0.52} ({0.50}-{0.54}) "
        "| {0.78} ({0.75}-{0.80}) |",
    ),
    capacity_row(
        6,
        "| 6 | {9.46} | {1.12} ({0.97}-{1.27}) | {0.86} ({0.75}-{0.98}) | {0.61} ({0.53}-{0.69}) "
        "| {0.90} ({0.78}-{1.03}) |",
    ),
    capacity_row(
        11,
        "| 11 | {9.46} | at least {1.47} | at least {1.13} | at least {0.80} | at least {1.19} |",
    ),
    PageNumbers(
        "measurements/learner.md",
        PRICES,
        "| 300 s | {20.83} | {10.50} | {9.48} | {9.50} | {9.48} | {9.46} | {9.46} |",
        tuple(f"300/{place}" for place in range(7)),
    ),
    PageNumbers(
        "measurements/learner.md",
        PRICES,
        "| 1,200 s | {35.78} | {15.90} | {10.12} | {9.45} | {9.40} | {9.45} | {9.42} |",
        tuple(f"1200/{place}" for place in range(7)),
    ),
    learner_row(
        1,
        "default",
        "| 1 | default and plain clip (the same run) | +{0.024} ({-0.014} to {0.062}) | {0.92} ({0.72}-{1.13}) "
        "| {0.89} ({0.81}-{0.96}) | {0.94} ({0.86}-{1.01}) |",
    ),
    learner_row(
        3,
        "default",
        "| 3 | default | +{0.014} ({-0.016} to {0.044}) | {0.90} ({0.77}-{1.04}) | {0.96} ({0.86}-{1.05}) "
        "| {0.96} ({0.92}-{0.99}) |",
    ),
    learner_row(
        3,
        "clip",
        "| 3 | plain clip | +{0.017} ({-0.017} to {0.050}) | {0.89} ({0.64}-{1.14}) | {0.89} ({0.75}-{1.02}) "
        "| {0.94} ({0.85}-{1.04}) |",
    ),
    learner_row(
        6,
        "default",
        "| 6 | default | {-0.015} ({-0.025} to {-0.004}) | {1.01} ({0.89}-{1.13}) | {1.03} ({0.95}-{1.12}) "
        "| {1.12} ({0.97}-{1.27}) |",
    ),
    learner_row(
        6,
        "clip",
        "| 6 | plain clip | {-0.015} ({-0.050} to {0.021}) | {1.07} ({0.90}-{1.24}) | {1.04} ({0.85}-{1.22}) "
        "| {1.13} ({1.01}-{1.25}) |",
    ),
    learner_row(
        11,
        "default",
        "| 11 | default | {-0.072} ({-0.126} to {-0.018}) | {1.44} ({1.27}-{1.61}) | {1.41} ({1.06}-{1.76}) "
        "| at least {1.47} |",
    ),
    learner_row(
        11,
        "clip",
        "| 11 | plain clip | {-0.092} ({-0.131} to {-0.054}) | {1.56} ({1.40}-{1.71}) | {1.50} ({1.48}-{1.52}) "
        "| at least {1.48} |",
    ),
    PageNumbers(
        "measurements/learner.md",
        SWEEP,
        "| 11 | 1 | 9.9 | {-0.33} ({-0.37}, {-0.28}) | {-0.02} ({-0.04}, {-0.00}) |",
        tuple(
            f"11 1 {correction}/against_{which}"
            for correction in ("none", "clip_tis")
            for which in ("synchronous", "min", "max")
        ),
    ),
]


@pytest.mark.parametrize("row", RECORDED, ids=lambda row: f"{row.page}: {row.text[:24]}")
def test_a_number_of_recorded_runs_has_not_moved(row: PageNumbers) -> None:
    assert missing(row, page_text(row.page)) == []
    assert moved(row, COMPUTED[row.command]()) == []


BENCHMARKS = [
    (
        "an accuracy costs {0.74} times as much as in an asynchronous data centre ({0.71}-{0.77};",
        "asynchronous",
    ),
    ("S = 3 costs {0.52} times as much ({0.50}-{0.54})", "synchronous"),
    ("and {0.78} times ({0.75}-{0.80}) with the 1,508 s", "published"),
]


@pytest.mark.parametrize(("text", "centre"), BENCHMARKS)
def test_the_price_of_an_accuracy_has_not_moved(text: str, centre: str) -> None:
    row = PageNumbers(
        "benchmarks.md", "make figures", text, cell("default 3 240", f"over_{centre}")
    )
    assert missing(row, page_text(row.page)) == []
    assert moved(row, accuracies()) == []


# --- the test itself


def test_a_planted_wrong_number_is_found() -> None:
    row = PageNumbers(
        "x.md", "echo2d plan a.toml", "it takes {1,250} s, {2.5} %", ("a/0/b", "c * 100")
    )
    page = "Type `echo2d plan\na.toml`: it takes\n1,250 s, 2.5 %."
    facts = {"a": [{"b": 1250.4}], "c": 0.0254}
    assert (missing(row, page), moved(row, facts)) == ([], [])
    assert missing(row, page.replace("2.5 %", "2.6 %")) == ["it takes 1,250 s, 2.5 %"]
    assert missing(row, page.replace("a.toml", "b.toml")) == ["echo2d plan a.toml"]
    assert moved(row, {**facts, "c": 0.0256}) == ["c * 100: the page says 2.5, the command 2.56"]
    assert len(moved(row, {"a": [{"b": 1251}], "c": 0.1})) == 2
