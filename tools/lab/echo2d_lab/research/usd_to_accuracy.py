"""Dollars until a run is as good as a synchronous one: docs/figures/usd_to_accuracy{.csv,.png}, usd_by_staleness.csv.

`python -m echo2d_lab.research.usd_to_accuracy` multiplies two measurements:

    steps ratio    of the long staleness sweep (docs/staleness_long.jsonl): train steps until a run has the accuracy
                   that the run of its seed with S = 0 has after GOAL steps, over those that the latter took
    usd a step     of scenarios/mix-rented.toml, played with the same S and kappa = 1, three seeds each, and again with
                   long answers: 42 runs, four minutes on one core. What usd_by_staleness.csv has is not played again;
                   remove it to play anew

and compares with the two data centres of that file's `[centralized]`, which learn like S = 0: an asynchronous one, and
one that generates and trains by turns.
"""

import gc
import heapq
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from echo2d.plan.fleet.break_even import break_even
from echo2d.plan.fleet.forecast import Ablation, provision
from echo2d.plan.fleet.spec import FleetSpec, load_fleet
from echo2d.plan.fleet.world import FleetWorld
from echo2d_lab.research.artefacts import FIGURES, cell, read, write
from echo2d_lab.research.cost_table import SCENARIOS
from echo2d_lab.research.staleness_sweep import LONG_RUNS, SEEDS, finished

SCENARIO = SCENARIOS / "mix-rented.toml"
PRICES, TABLE, PICTURE = (
    FIGURES / name
    for name in ("usd_by_staleness.csv", "usd_to_accuracy.csv", "usd_to_accuracy.png")
)
PRICED = (0, 1, 2, 3, 4, 6, 11)
ANSWERS_S = (300.0, 1200.0)  # what one takes: as in the file, and three quarters of a train step
GOAL = 240  # train steps of the synchronous run
WINDOW = 5  # looks whose mean is the accuracy of the middle one
DRAWS = 10_000  # of seeds, for an interval
PLAYED = 2000  # times that a data centre generates, for a mean
CORRECTIONS = (("default", "default", "#2f6db5"), ("clip", "plain clip", "#e08a2e"))
CURVES = {0: "#444444", 1: "#7a4fb5", 3: "#2f6db5", 6: "#2d8a57", 11: "#b5403c"}  # by S
CURVE_PLACES = {1: 0, 3: 1, 6: 2, 11: 3}  # on the axis
Curve = Sequence[tuple[float, float]]  # train step, accuracy
Rows = Sequence[Mapping[str, Any]]


def smooth(looks: Curve) -> list[tuple[float, float]]:
    """Each look that has WINDOW // 2 others on both sides, with the mean of them all."""
    around = [looks[first : first + WINDOW] for first in range(len(looks) - WINDOW + 1)]
    return [(each[WINDOW // 2][0], fmean(accuracy for _, accuracy in each)) for each in around]


def accuracy_at(curve: Curve, step: float) -> float:
    return next(accuracy for at, accuracy in curve if at >= step)


def steps_to(curve: Curve, accuracy: float) -> float | None:
    """When it first has this accuracy, between two looks as on a line; None: never."""
    before, below = curve[0]
    for step, found in curve:
        if found >= accuracy:
            share = (accuracy - below) / (found - below) if found > below else 1.0
            return before + (step - before) * share
        before, below = step, found
    return None


def ratios(runs: Rows, staleness: int, correction: str) -> list[float | None]:
    """Train steps over those of S = 0 with the same seed, seed by seed; None: the run was too short."""
    curves = {
        (row["correction"], row["staleness"], row["seed"]): smooth(row["looks"]) for row in runs
    }
    found = []
    for (*setting, seed), curve in sorted(curves.items()):
        fresh = curves.get(("default", 0, seed))
        if setting == [correction, staleness] and fresh is not None:
            goal = accuracy_at(fresh, GOAL)
            took, takes = steps_to(fresh, goal), steps_to(curve, goal)
            assert took is not None
            found.append(takes and takes / took)
    return found


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Of the mean: 95 %, by drawing seeds with replacement."""
    chance = random.Random(0)
    means = sorted(fmean(chance.choices(values, k=len(values))) for _ in range(DRAWS))
    return means[DRAWS // 40], means[-DRAWS // 40]


# --- usd a step


def play(fleet: FleetSpec, staleness: int, answer_s: float, seed: int) -> dict[str, Any]:
    """One run in virtual time."""
    learner = replace(fleet.learner, staleness_max=staleness, publish_every=1)
    policy = replace(fleet.policy, t_gen_s=answer_s)
    played = replace(
        fleet, learner=learner, policy=policy, simulate=replace(fleet.simulate, rng_seed=seed)
    )
    facts = FleetWorld(played, Ablation(rng_seed=seed)).run()
    kept = {name: facts[name] for name in ("usd_per_step", "bubble", "steps")}
    return {"S": staleness, "answer_s": answer_s, "seed": seed, **kept}


def prices(fleet: FleetSpec, answer_s: float = ANSWERS_S[0]) -> dict[int, float]:
    """Usd a step by S; plays what the file lacks."""
    rows: list[Mapping[str, Any]] = list(read(PRICES))
    there = {(int(row["S"]), float(row["answer_s"]), int(row["seed"])) for row in rows}
    wanted = [(bound, answer_s, seed) for bound in PRICED for seed in SEEDS]
    for number, each in enumerate(wanted, start=1):
        if each not in there:
            print(f"run {number} of {len(wanted)}: {each}", file=sys.stderr, flush=True)
            rows.append(play(fleet, *each))
            write(PRICES, rows)
    return {
        bound: fmean(
            float(row["usd_per_step"])
            for row in rows
            if (int(row["S"]), float(row["answer_s"])) == (bound, answer_s)
        )
        for bound in PRICED
    }


def by_turns_s(fleet: FleetSpec) -> float:
    """Seconds of a step in that data centre if all its GPUs generate, then all train, with nothing else lost.

    `step_s` is what its halves take beside each other, so both parts together would take as long, but for the last
    answers: R of them, as long as the file says, on as many slots as make them in `step_s` at the rollouts' share of
    the machines. The mean of PLAYED draws.
    """
    policy, chance, compared = fleet.policy, random.Random(0), break_even(fleet, provision(fleet))
    assert compared is not None
    assert fleet.centralized is not None
    step_s, rollouts = fleet.centralized.step_s, compared.rollout_share
    sigma, wanted = fleet.simulate.gen_sigma, fleet.learner.trajectories_per_step
    slots = round(wanted * policy.t_gen_s / (step_s * rollouts))

    def generation_s() -> float:
        free = [0.0] * slots
        for _ in range(wanted):
            takes_s = policy.t_gen_s * chance.lognormvariate(-sigma * sigma / 2, sigma)
            heapq.heapreplace(free, free[0] + takes_s)
        return max(free)

    return (1.0 - rollouts) * step_s + fmean(generation_s() for _ in range(PLAYED))


def references(fleet: FleetSpec) -> dict[str, float]:
    """Usd a step of the data centres."""
    there = fleet.centralized
    assert there is not None
    assert there.synchronous_usd_per_step is not None
    return {"asynchronous": there.usd_per_step, "synchronous": there.synchronous_usd_per_step}


# --- the answer


def table(
    runs: Rows, usd: Mapping[int, float], there: Mapping[str, float]
) -> Iterator[dict[str, Any]]:
    """A row for each S and correction. A run that was too short counts with its last step."""
    last = smooth(runs[0]["looks"])[-1][0] / GOAL
    for correction, staleness in sorted({(row["correction"], row["staleness"]) for row in runs}):
        found = ratios(runs, staleness, correction)
        steps = [ratio or last for ratio in found]
        yield {
            "correction": correction,
            "S": staleness,
            "runs": len(found),
            "too_short": found.count(None),
            "accuracy": fmean(
                accuracy_at(smooth(row["looks"]), GOAL)
                for row in runs
                if (row["correction"], row["staleness"]) == (correction, staleness)
                and row["seed"] in SEEDS
            ),
            **spread("steps_ratio", steps, 1.0),
            "usd_per_step": usd[staleness],
            **spread("over_asynchronous", steps, usd[staleness] / there["asynchronous"]),
            **spread("over_synchronous", steps, usd[staleness] / there["synchronous"]),
        }


def spread(name: str, ratios: Sequence[float], times: float) -> dict[str, float]:
    """Their mean and its interval, each so many times."""
    low, high = interval(ratios)
    return {name: times * fmean(ratios), f"{name}_low": times * low, f"{name}_high": times * high}


def draw(
    runs: Rows,
    rows: Rows,
    usd: Mapping[int, float],
    there: Mapping[str, float],
    path: Path = PICTURE,
) -> None:
    """Accuracy over train steps and over usd, and usd until GOAL over those of a data centre, by S."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.5, 4.0), layout="constrained")
    over_steps, over_usd, answer = figure.subplots(1, 3)
    for bound, colour in CURVES.items():
        steps, accuracy = mean_curve(runs, bound)
        over_steps.plot(steps, accuracy, color=colour, label=f"S = {bound}")
        over_usd.plot([usd[bound] * step for step in steps], accuracy, color=colour)
    steps, accuracy = mean_curve(runs, 0)
    for (name, price), style in zip(there.items(), ("--", ":"), strict=True):
        line: dict[str, Any] = {"linestyle": style, "color": "black", "linewidth": 1}
        over_usd.plot(
            [price * step for step in steps], accuracy, label=f"{name} data centre", **line
        )
        answer.axhline(price / there["asynchronous"], **line)
    for shift, (correction, label, colour) in zip((-0.12, 0.12), CORRECTIONS, strict=True):
        mine = [row for row in rows if row["correction"] == correction and row["S"] > 0]
        at = [CURVE_PLACES[row["S"]] + shift for row in mine]
        means = [row["over_asynchronous"] for row in mine]
        ends = [
            [abs(row[f"over_asynchronous_{end}"] - row["over_asynchronous"]) for row in mine]
            for end in ("low", "high")
        ]
        answer.errorbar(at, means, ends, fmt="o", color=colour, capsize=3, label=label)
    answer.set_xticks(list(CURVE_PLACES.values()), [f"S = {bound}" for bound in CURVE_PLACES])
    over_steps.set(xlabel="train steps", title="accuracy, mean of three seeds")
    over_usd.set(xlabel="usd", title="accuracy over what was paid")
    answer.set_title(
        f"usd until the accuracy of S = 0 at\nstep {GOAL}; asynchronous data centre: 1"
    )
    for axes in (over_steps, over_usd, answer):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def mean_curve(runs: Rows, staleness: int) -> tuple[list[float], list[float]]:
    """Steps and accuracies of the default correction, over the seeds that every S has."""
    curves = [
        smooth(row["looks"])
        for row in runs
        if (row["correction"], row["staleness"]) == ("default", staleness) and row["seed"] in SEEDS
    ]
    return [step for step, _ in curves[0]], [
        fmean(accuracy for _, accuracy in looks) for looks in zip(*curves, strict=True)
    ]


def main() -> None:
    gc.disable()  # as `echo2d simulate` does
    fleet, runs = load_fleet(SCENARIO), finished(LONG_RUNS)
    usd, _ = (prices(fleet, answer_s) for answer_s in ANSWERS_S)
    rows = list(table(runs, usd, references(fleet)))
    write(TABLE, rows)
    draw(runs, rows, usd, references(fleet))
    for row in rows:
        print(*(cell(value) for value in row.values()), sep="\t")


if __name__ == "__main__":
    main()
