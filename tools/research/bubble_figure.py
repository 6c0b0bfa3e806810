"""Bubble over mu_pool / mu_min by the formula, simulated, and in a real run: docs/figures/bubble.{csv,png}.

`python -m tools.research.bubble_figure` computes the first two anew for the points that
docs/figures/bubble_run.csv has; `--run` first measures those that it lacks
(`echo2d.bench.coordinator.bubble`: programs on loopback, both modes at once, two minutes a ratio, a
quarter of an hour for all; it goes on where it was stopped). What a run measured of T_train,
T_bcast, standing still and the pause of a refit goes into formula and simulation: what they predict
is the bubble.
"""

import argparse
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from echo2d.bench.coordinator.bubble import (
    PER_STEP,
    SLOTS,
    T_TRAIN_S,
    WORKERS,
    Measured,
    demand,
    measure,
)
from echo2d.core.capacity.model import Demand, DisseminationMode, bubble, mu_min
from echo2d.sim.fleet.spec import FleetSpec, read_fleet
from echo2d.sim.fleet.world import FleetWorld
from echo2d.sim.kernel.scenario import MBIT
from tools.research.artefacts import FIGURES, cell, read, write

MODES: tuple[DisseminationMode, ...] = ("background", "exclusive")
RATIOS = (
    1.0,
    0.7,
    1.1,
    0.9,
    0.8,
    1.2,
    1.3,
)  # aimed at, by what was measured before; the CSV has what they were
T_BCAST_S, STILL_S = 0.41, 0.37  # before anything was
RUNS, BUBBLES, PICTURE = (FIGURES / name for name in ("bubble_run.csv", "bubble.csv", "bubble.png"))
SIMULATED_PERIODS = 200
LINK_MBPS = 1000.0  # of the simulated workers; the version is as large as makes T_bcast
GEN_SIGMA = 0.1  # samples of the real engine are equally long, but share its pace with others


def pool(mode: DisseminationMode, ratio: float, known: Sequence[Measured] = ()) -> float:
    """mu_pool to set for this ratio, if versions take as long as in the points of this mode that are known."""
    mine = [one for one in known if one.mode == mode]
    t_bcast_s = median(one.t_bcast_s for one in mine) if mine else T_BCAST_S
    still_s = median(one.still_s for one in mine) if mine else STILL_S
    needed = mu_min(demand(mode, T_TRAIN_S, t_bcast_s, still_s, 0.0, PER_STEP / T_TRAIN_S))
    assert needed is not None
    return ratio * needed


def run(path: Path) -> None:
    """Measure what the file lacks, both modes at the same time."""
    for done, ratio in enumerate(RATIOS):
        rows: list[dict[str, Any]] = list(read(path))
        known = {row["mode"] for row in rows if row["aimed_at"] == str(ratio)}
        missing = [mode for mode in MODES if mode not in known]
        points = [measured(row) for row in rows]
        print(
            f"{ratio}, {len(RATIOS) - done} to go: {', '.join(missing) or 'known'}",
            file=sys.stderr,
            flush=True,
        )
        with ThreadPoolExecutor(len(MODES)) as side_by_side:
            found = side_by_side.map(
                measure, missing, [pool(mode, ratio, points) for mode in missing]
            )
        rows += [{"aimed_at": str(ratio), **asdict(each)} for each in found]
        if missing:
            write(path, rows)


def measured(row: Mapping[str, str]) -> Measured:
    floats = ("mu_pool", "t_train_s", "t_bcast_s", "still_s", "pause_s", "bubble")
    ints = ("periods", "max_staleness", "dropped", "spoiled")
    numbers: dict[str, Any] = {name: float(row[name]) for name in floats} | {
        name: int(row[name]) for name in ints
    }
    return Measured(mode="exclusive" if row["mode"] == "exclusive" else "background", **numbers)


def compared(points: Sequence[Measured]) -> Iterator[dict[str, Any]]:
    """The rows of the figure."""
    for point in sorted(points, key=lambda one: (one.mode, one.mu_pool)):
        needs = point.demand
        needed = mu_min(needs)
        assert needed is not None
        found = {
            "formula": bubble(needs, point.mu_pool),
            "simulated": simulated(needs, point.mu_pool),
            "measured": point.bubble,
        }
        yield {
            "mode": point.mode,
            "mu_pool_over_mu_min": point.mu_pool / needed,
            "t_bcast_over_period": needs.t_bcast_s / needs.period_s,
            "lost_over_period": needs.lost_s / needs.period_s,
            **found,
            "spread": max(found.values()) - min(found.values()),
        }


def simulated(needs: Demand, mu_pool: float) -> float:
    """The bubble of the same workers in virtual time."""
    return float(FleetWorld(_fleet(needs, mu_pool)).run()["bubble"])


def _fleet(needs: Demand, mu_pool: float) -> FleetSpec:
    spread_s = max(1e-3, needs.t_bcast_s - needs.pause_s)
    worker = {
        "name": "w",
        "count": WORKERS,
        "trajectories_per_h": 3600.0 * mu_pool / WORKERS,
        "rtt_ms": 1,
    }
    return read_fleet(
        {
            "learner": {
                "t_train_s": needs.t_train_s,
                "trajectories_per_step": needs.trajectories_per_step,
                "staleness_max": needs.staleness_max,
                "publish_every": needs.publish_every,
                "uplink_mbps": 10 * LINK_MBPS,
            },
            "model": {"params": spread_s * LINK_MBPS * MBIT, "bytes_per_param": 1},
            "fleet": [{**worker, "downlink_mbps": LINK_MBPS, "uplink_mbps": 10 * LINK_MBPS}],
            "policy": {
                "mode": needs.mode,
                "pause_s": needs.pause_s,
                "t_gen_s": WORKERS * SLOTS / mu_pool,
                "still_share": needs.still_share,
                "gamma": 10.0,  # all work
            },
            "simulate": {
                "hours": SIMULATED_PERIODS * needs.period_s / 3600.0,
                "group_size": 1,
                "gen_sigma": GEN_SIGMA,
                "train_sigma": 0.0,
            },
        }
    )


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    for axes, mode in zip(figure.subplots(1, len(MODES), sharey=True), MODES, strict=True):
        mine = [row for row in rows if row["mode"] == mode]
        across = [row["mu_pool_over_mu_min"] for row in mine]
        for kind, style in {"formula": "k--", "simulated": "s-", "measured": "o-"}.items():
            axes.plot(across, [100 * row[kind] for row in mine], style, label=kind, markersize=5)
        axes.axvline(1.0, color="#999999", linewidth=0.8)
        axes.set(title=f"{mode}: {len(mine)} runs", xlabel="mu_pool / mu_min", ylabel="bubble, %")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--run", action="store_true", help="measure the points that bubble_run.csv lacks"
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # nothing is left running either way
    if parser.parse_args().run:
        run(RUNS)
    rows = list(compared([measured(row) for row in read(RUNS)]))
    write(BUBBLES, rows)
    draw(rows, PICTURE)
    for row in rows:
        print(*(cell(value) for value in row.values()))


if __name__ == "__main__":
    main()
