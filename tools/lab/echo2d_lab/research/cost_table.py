"""The cost of a train step without parts of the system, and in a data centre: docs/figures/cost{.csv,.png,_runs.csv}.

`python -m echo2d_lab.research.cost_table` simulates `scenarios/mix-*.toml`, each case with several seeds
(of arrivals, speeds, lengths and prices, and of the order in which workers are taken if prices do not
count): 63 runs, 5 minutes on one core. Runs in cost_runs.csv are not made again; remove the file to
repeat them. There are two systems: ECHO-2's (exclusive broadcasts of whole versions) and echo2d's (deltas
that arrive while workers generate). "planned" is the prediction of `echo2d plan`.
"""

import gc
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from echo2d.core.rules.run import DisseminationMode
from echo2d.plan.fleet.forecast import Ablation, provision
from echo2d.plan.fleet.spec import FleetSpec, load_fleet
from echo2d.plan.fleet.world import FleetWorld
from echo2d_lab.research.artefacts import FIGURES, cell, read, write

SCENARIOS = Path(__file__).parents[4] / "scenarios"
MIXES = ("rented", "spot", "metered")
SEEDS = 3
RUNS, COSTS, PICTURE = FIGURES / "cost_runs.csv", FIGURES / "cost.csv", FIGURES / "cost.png"
BARS = {
    "": "#2f6db5",
    "p2p": "#e08a2e",
    "cost-awareness": "#b5403c",
    "deltas": "#2d8a57",
}  # by what is left out
BAR_WIDTH = 0.2  # relative to the distance between two systems


class System(NamedTuple):
    """A system: how versions reach the workers."""

    name: str
    mode: DisseminationMode
    delta: bool


SYSTEMS = (System("ECHO-2", "exclusive", delta=False), System("echo2d", "background", delta=True))
CASES = {  # what is left out of the system
    "": Ablation(),
    "p2p": Ablation(p2p=False),
    "cost-awareness": Ablation(by_cost=False),
    "deltas": Ablation(delta=False),
}


def cases() -> Iterator[tuple[str, System, str]]:
    """Every row of the table: mix, system, the part that is left out."""
    for mix in MIXES:
        for system in SYSTEMS:
            yield from ((mix, system, out) for out in CASES if system.delta or out != "deltas")


def fleet_of(mix: str, system: System) -> FleetSpec:
    fleet = load_fleet(SCENARIOS / f"mix-{mix}.toml")
    return replace(fleet, policy=replace(fleet.policy, mode=system.mode))


def ablation_of(system: System, out: str, rng_seed: int) -> Ablation:
    return replace(CASES[out], delta=system.delta and CASES[out].delta, rng_seed=rng_seed)


def play(mix: str, system: System, out: str, seed: int) -> dict[str, Any]:
    """One run."""
    fleet = fleet_of(mix, system)
    fleet = replace(fleet, simulate=replace(fleet.simulate, rng_seed=seed))
    facts = FleetWorld(fleet, ablation_of(system, out, seed)).run()
    kept = {name: facts[name] for name in ("usd_per_step", "bubble", "t_bcast_s", "steps")}
    return {"mix": mix, "system": system.name, "without": out, "seed": seed, **kept}


def run(path: Path) -> list[dict[str, str]]:
    """Make the runs that the file lacks."""
    rows: list[Mapping[str, Any]] = list(read(path))
    wanted = [(*case, seed) for seed in range(SEEDS) for case in cases()]
    for number, (mix, system, out, seed) in enumerate(wanted, start=1):
        if not any(_key(row) == (mix, system.name, out, str(seed)) for row in rows):
            print(
                f"run {number} of {len(wanted)}: {mix} {system.name} {out} {seed}",
                file=sys.stderr,
                flush=True,
            )
            rows.append(play(mix, system, out, seed))
            write(path, rows)
    return read(path)


def _key(row: Mapping[str, Any]) -> tuple[str, str, str, str]:
    return row["mix"], row["system"], row["without"], str(row["seed"])


def table(rows: Sequence[Mapping[str, str]]) -> Iterator[dict[str, Any]]:
    """The rows of the table: simulated and planned."""
    for mix, system, out in cases():
        yield {**means(rows, mix, system, out), "planned_usd_per_step": planned(mix, system, out)}


def means(rows: Sequence[Mapping[str, str]], mix: str, system: System, out: str) -> dict[str, Any]:
    """Means over seeds, and their difference from the whole system and from the data centre, in percent."""
    usd, bubbles = (
        _of(rows, mix, system, out, "usd_per_step"),
        _of(rows, mix, system, out, "bubble"),
    )
    whole = fmean(_of(rows, mix, system, "", "usd_per_step"))
    elsewhere = fleet_of(mix, system).centralized
    assert elsewhere is not None
    return {
        "mix": mix,
        "system": system.name,
        "without": out,
        "usd_per_step": fmean(usd),
        "sd": stdev(usd) if len(usd) > 1 else "",
        "runs": len(usd),
        "over_whole_percent": 100 * (fmean(usd) / whole - 1),
        "over_centralized_percent": 100 * (fmean(usd) / elsewhere.usd_per_step - 1),
        "bubble_percent": 100 * fmean(bubbles),
    }


def planned(mix: str, system: System, out: str) -> float:
    fleet = fleet_of(mix, system)
    return fmean(
        provision(fleet, ablation_of(system, out, seed)).usd_per_step
        for seed in (range(SEEDS) if out == "cost-awareness" else [0])
    )


def _of(
    rows: Sequence[Mapping[str, str]], mix: str, system: System, out: str, name: str
) -> list[float]:
    """A figure in each run of the case."""
    return [float(row[name]) for row in rows if _key(row)[:3] == (mix, system.name, out)]


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw a picture for each mix: bars by system and left-out part, and the data centre as a line."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.8), layout="constrained")
    plots = figure.subplots(1, len(MIXES), sharey=True)
    for axes, mix in zip(plots, MIXES, strict=True):
        for place, (out, colour) in enumerate(BARS.items()):
            mine = [row for row in rows if (row["mix"], row["without"]) == (mix, out)]
            at = [_place(row["system"]) + BAR_WIDTH * place for row in mine]
            usd, spread = [row["usd_per_step"] for row in mine], [row["sd"] or 0.0 for row in mine]
            label = f"without {out}" if out else "all of it"
            axes.bar(at, usd, BAR_WIDTH, yerr=spread, color=colour, capsize=2, label=label)
        elsewhere = fleet_of(mix, SYSTEMS[0]).centralized
        assert elsewhere is not None
        axes.axhline(
            elsewhere.usd_per_step, color="black", linestyle="--", linewidth=1, label="data centre"
        )
        middle = [
            _place(system.name) + BAR_WIDTH * (3 if system.delta else 2) / 2 for system in SYSTEMS
        ]
        axes.set_xticks(middle, [system.name for system in SYSTEMS])
        axes.set_title(mix, fontsize=10)
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
    plots[0].set_ylabel("usd a step")
    figure.legend(
        *plots[-1].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8
    )
    figure.savefig(path, dpi=110)


def _place(system: str) -> float:
    return [each.name for each in SYSTEMS].index(system)


def main() -> None:
    gc.disable()  # as `echo2d simulate` does
    rows = list(table(run(RUNS)))
    write(COSTS, rows)
    draw(rows, PICTURE)
    for row in rows:
        print(*(cell(value) for value in row.values()), sep="\t")


if __name__ == "__main__":
    main()
