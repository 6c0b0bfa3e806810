"""Usd until a run is as accurate as a synchronous one: docs/figures/usd_to_accuracy{.csv,.png}, usd_by_staleness.csv.

`python -m echo2d_lab.research.usd_to_accuracy` multiplies two measurements:

    steps ratio    of the long staleness sweep (staleness_long.jsonl): train steps until a run reaches the accuracy that
                   the run of its seed with S = 0 has after 120, 180 or 240 steps (GOALS), over those steps
    usd a step     of scenarios/mix-rented.toml, simulated with the same S and kappa = 1, three seeds each, and again
                   with long answers: 42 runs, four minutes on one core. Runs in usd_by_staleness.csv are not made
                   again; remove the file to repeat them

and compares with data centres that learn like S = 0: the two of that file's `[centralized]`, an asynchronous one and
one that generates and trains by turns, and the latter with the step time that is quoted from ECHO-2's paper.

Intervals are Student's, of the mean over seeds. Each value is a ratio or a difference of two runs with the same seed,
so the seeds are paired. The intervals assume independent values of a normal distribution.
"""

import gc
import heapq
import itertools
import math
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
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
# Seconds of an answer: as in the file, and three quarters of a train step.
ANSWERS_S = (300.0, 1200.0)
GOALS = (120, 180, 240)  # train steps of the synchronous run
GOAL = GOALS[-1]  # the goal in the picture
WINDOW = 5  # the accuracy of a look is the mean of this many looks around it
# For n values: 95 % of Student's distribution with n - 1 degrees of freedom are within this distance of 0.
T95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
PUBLISHED_S = 1508.0  # a synchronous step of ECHO-2's paper, as third parties quote it
PLAYED = 2000  # draws of a data centre's generation time, for their mean
CORRECTIONS = (("default", "default", "#2f6db5"), ("clip", "plain clip", "#e08a2e"))
CURVES = {0: "#444444", 1: "#7a4fb5", 3: "#2f6db5", 6: "#2d8a57", 11: "#b5403c"}  # by S
CENTRES = {
    "asynchronous": "asynchronous data centre",
    "synchronous": "by turns",
    "published": "by turns, as published",
}
CURVE_PLACES = {1: 0, 3: 1, 6: 2, 11: 3}  # on the axis
Curve = Sequence[tuple[float, float]]  # train step, accuracy
Looks = list[tuple[float, float]]
Rows = Sequence[Mapping[str, Any]]


def smooth(looks: Curve) -> list[tuple[float, float]]:
    """Each look that has WINDOW // 2 others on both sides, with the mean of all of them."""
    around = [looks[first : first + WINDOW] for first in range(len(looks) - WINDOW + 1)]
    return [(each[WINDOW // 2][0], fmean(accuracy for _, accuracy in each)) for each in around]


def accuracy_at(curve: Curve, step: float) -> float:
    return next(accuracy for at, accuracy in curve if at >= step)


def steps_to(curve: Curve, accuracy: float) -> float | None:
    """The step at which the curve first has this accuracy, interpolated between two looks; None: never."""
    before, below = curve[0]
    for step, found in curve:
        if found >= accuracy:
            share = (accuracy - below) / (found - below) if found > below else 1.0
            return before + (step - before) * share
        before, below = step, found
    return None


def pairs(runs: Rows, staleness: int, correction: str) -> Iterator[tuple[int, Looks, Looks]]:
    """Seed by seed: the smoothed run with S = 0 and the one with this setting."""
    curves = {
        (row["correction"], row["staleness"], row["seed"]): smooth(row["looks"]) for row in runs
    }
    for (*setting, seed), curve in sorted(curves.items()):
        fresh = curves.get(("default", 0, seed))
        if setting == [correction, staleness] and fresh is not None:
            yield seed, fresh, curve


def ratios(runs: Rows, staleness: int, correction: str, goal: int = GOAL) -> list[float | None]:
    """Train steps over those of S = 0 with the same seed, seed by seed; None: the run was too short."""
    found = []
    for _, fresh, curve in pairs(runs, staleness, correction):
        accuracy = accuracy_at(fresh, goal)
        took, takes = steps_to(fresh, accuracy), steps_to(curve, accuracy)
        assert took is not None
        found.append(takes and takes / took)
    return found


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Student's 95 % interval of the mean; None: one value has none."""
    if len(values) < 2:
        return None
    half = T95[len(values)] * stdev(values) / math.sqrt(len(values))
    return fmean(values) - half, fmean(values) + half


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
    """Usd a step by S; makes the runs that the file lacks."""
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
    """Seconds of a step in that data centre if all its GPUs generate, and then all train, with no other loss.

    In `step_s` one part of the GPUs generates while the other trains, so with all GPUs both phases together take as
    long, except for the wait for the last of R answers. The lengths are those of the file; the number of slots is the
    one with which the rollouts' share of the machines makes R answers in `step_s`. The result is the mean of PLAYED
    draws.
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
    return {
        "asynchronous": there.usd_per_step,
        "synchronous": there.synchronous_usd_per_step,
        "published": there.usd_per_h * PUBLISHED_S / 3600.0,
    }


# --- the answer


def table(
    runs: Rows, usd: Mapping[int, float], there: Mapping[str, float]
) -> Iterator[dict[str, Any]]:
    """A row for each S, correction and goal. A run that was too short counts with its last step.

    A mean that includes such a run is a lower bound, so it has no interval.
    """
    last = smooth(runs[0]["looks"])[-1][0]
    settings = sorted({(row["correction"], row["staleness"]) for row in runs})
    for goal, (correction, staleness) in itertools.product(GOALS, settings):
        found = ratios(runs, staleness, correction, goal)
        steps = [ratio or last / goal for ratio in found]
        known = None not in found
        compared = [
            (accuracy_at(fresh, goal), accuracy_at(curve, goal))
            for seed, fresh, curve in pairs(runs, staleness, correction)
            if seed in SEEDS
        ]
        yield {
            "correction": correction,
            "S": staleness,
            "goal": goal,
            "runs": len(found),
            "too_short": found.count(None),
            "accuracy": fmean(accuracy for _, accuracy in compared),
            **spread("gain", [accuracy - fresh for fresh, accuracy in compared]),
            **spread("steps_ratio", steps, known=known),
            "usd_per_step": usd[staleness],
            **{
                name: value
                for centre, price in there.items()
                for name, value in spread(
                    f"over_{centre}", steps, usd[staleness] / price, known=known
                ).items()
            },
        }


def spread(
    name: str, values: Sequence[float], times: float = 1.0, *, known: bool = True
) -> dict[str, float | str]:
    """The mean of the values and its interval, each multiplied by `times`; empty cells if there is no interval."""
    ends = interval(values) if known else None
    low, high = ("", "") if ends is None else (times * ends[0], times * ends[1])
    return {name: times * fmean(values), f"{name}_low": low, f"{name}_high": high}


def draw(
    runs: Rows,
    rows: Rows,
    usd: Mapping[int, float],
    there: Mapping[str, float],
    path: Path = PICTURE,
) -> None:
    """Draw accuracy over train steps and over usd, and usd until GOAL relative to a data centre, by S."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.5, 4.0), layout="constrained")
    over_steps, over_usd, answer = figure.subplots(1, 3)
    for bound, colour in CURVES.items():
        steps, accuracy = mean_curve(runs, bound)
        over_steps.plot(steps, accuracy, color=colour, label=f"S = {bound}")
        over_usd.plot([usd[bound] * step for step in steps], accuracy, color=colour)
    steps, accuracy = mean_curve(runs, 0)
    for (name, price), style in zip(there.items(), ("--", ":", "-."), strict=True):
        line: dict[str, Any] = {"linestyle": style, "color": "black", "linewidth": 1}
        over_usd.plot([price * step for step in steps], accuracy, label=CENTRES[name], **line)
        answer.axhline(price / there["asynchronous"], **line)
    for shift, (correction, label, colour) in zip((-0.12, 0.12), CORRECTIONS, strict=True):
        for row in rows:
            if (row["correction"], row["goal"]) == (correction, GOAL) and row["S"] > 0:
                mean, high = row["over_asynchronous"], row["over_asynchronous_high"]
                looks = {"fmt": "o", "color": colour, "capsize": 3}
                if row["too_short"]:
                    looks["fmt"] = "^"  # a lower bound
                at, half = CURVE_PLACES[row["S"]] + shift, high - mean if high else None
                answer.errorbar(at, mean, half, label=label if row["S"] == 1 else None, **looks)
    answer.set_xticks(list(CURVE_PLACES.values()), [f"S = {bound}" for bound in CURVE_PLACES])
    over_steps.set(xlabel="train steps", title="accuracy, mean of three seeds")
    over_usd.set(xlabel="usd", title="accuracy over what was paid")
    answer.set_title(
        f"usd until the accuracy of S = 0 at\nstep {GOAL}; asynchronous data centre: 1"
    )
    for axes in (over_steps, over_usd, answer):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, loc="best" if axes is not answer else (0.02, 0.74))
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
