"""Figures of docs/capacity.md from the planner: T_bcast over the number of workers, and what each part saves.

`python tools/capacity_figures.py` writes docs/figures/t_bcast.{csv,png} and cost.csv. Predictions, no runs.
"""

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

from echo2d.sim.fleet import MBPS_MAX, Fleet, load_fleet, read_fleet
from echo2d.sim.provision import Ablation, Planner, Provision, provision

REPO = Path(__file__).parents[1]
FIGURES = REPO / "docs" / "figures"
WORKERS = (2, 4, 8, 16, 32, 64, 128, 256)
SCENARIOS = ("fleet-small", "fleet-500", "fleet-metered")
SEEDS = 8  # random orders without prices


def alike(workers: int, uplink_mbps: float) -> Fleet:
    """8e9 parameters, 2 % of them on the wire, to workers on lines of 100 Mbit/s up and 400 down."""
    return read_fleet(
        {
            "learner": {
                "t_train_s": 100,
                "trajectories_per_step": 256,
                "staleness_max": 4,
                "uplink_mbps": uplink_mbps,
            },
            "model": {"params": 8e9, "wire_fraction": 0.02},
            "fleet": [{"name": "w", "count": workers, "trajectories_per_h": 360, "downlink_mbps": 400}],
        }
    )


def broadcasts() -> Iterator[dict[str, float]]:
    """T_verify in seconds by number of workers; the learner's host sends 1 Gbit/s, or as much as anybody can take."""
    for workers in WORKERS:
        limited = Planner(alike(workers, 1000), Ablation()).broadcast({"w": workers})
        free = Planner(alike(workers, MBPS_MAX), Ablation()).broadcast({"w": workers})
        yield {
            "workers": workers,
            "star_limited_s": limited.star_s,
            "star_unlimited_s": free.star_s,
            "echo2d_s": limited.planned_s,
            "bound_s": limited.bound_s,
        }


def costs() -> Iterator[dict[str, object]]:
    """usd per step of each scenario in both modes, with parts left out; over the full one."""
    for name in SCENARIOS:
        fleet = load_fleet(REPO / "scenarios" / f"{name}.toml")
        for mode in ("background", "exclusive"):
            yield from _cost(name, replace(fleet, policy=replace(fleet.policy, mode=mode)))


def _cost(name: str, fleet: Fleet) -> Iterator[dict[str, object]]:
    orders = [Ablation(by_cost=False, rng_seed=seed) for seed in range(SEEDS)]
    cases: Mapping[str, Sequence[Ablation]] = {
        "full": [Ablation()],
        "no p2p": [Ablation(p2p=False)],
        "no cost-awareness": orders,
        "no delta": [Ablation(delta=False)],
    }
    full = provision(fleet).usd_per_step
    for case, ablations in cases.items():
        found: list[Provision] = [provision(fleet, ablation) for ablation in ablations]
        usd = [each.usd_per_step for each in found]
        yield {
            "scenario": name,
            "mode": fleet.policy.mode,
            "left out": case,
            "usd_per_step": round(fmean(usd), 4),
            "spread": round(stdev(usd), 4) if len(usd) > 1 else "",
            "over full, %": round(100 * (fmean(usd) / full - 1), 1),
            "feasible": all(each.feasible for each in found),
            "bubble, %": round(100 * fmean(each.bubble for each in found), 1),
        }


def write(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)


def draw(rows: Sequence[Mapping[str, float]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    counts = [row["workers"] for row in rows]
    styles = {"star_limited_s": "o-", "star_unlimited_s": "s-", "echo2d_s": "^-", "bound_s": "k--"}
    for name, style in styles.items():
        axes.plot(counts, [row[name] for row in rows], style, label=name.removesuffix("_s").replace("_", " "))
    axes.set(xscale="log", yscale="log", xlabel="workers", ylabel="predicted T_verify, s", xticks=counts)
    axes.set_xticklabels([f"{count:g}" for count in counts])
    axes.minorticks_off()
    axes.set_title("320 MB to lines of 100 Mbit/s up, 400 down; the learner at 1 Gbit/s", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)


def main() -> None:
    FIGURES.mkdir(exist_ok=True)
    times = list(broadcasts())
    write(FIGURES / "t_bcast.csv", times)
    draw(times, FIGURES / "t_bcast.png")
    write(FIGURES / "cost.csv", list(costs()))


if __name__ == "__main__":
    main()
