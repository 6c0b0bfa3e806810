"""Bubble over mu_pool / mu_min by the formula, simulated, and in a real run: docs/figures/bubble.{csv,png}.

`python -m echo2d_lab.research.bubble_figure` computes the first two again for the points in
docs/figures/bubble_run.csv; `--run` first measures the points that the file lacks
(`echo2d_lab.bench.coordinator.bubble`: programs on loopback, two points at once, two minutes each time,
twenty minutes for all; it continues where it was stopped). A point has a mode and a group size: 1 in
both modes, 8 and 16 in background mode. Formula and simulation get the run's T_train, T_bcast, seconds
of standing still and pause of a refit, and predict the bubble.
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

from echo2d.core.capacity.model import Demand, bubble, mu_min
from echo2d.core.rules.run import DisseminationMode
from echo2d.plan.fleet.spec import FleetSpec, read_fleet
from echo2d.plan.fleet.world import FleetWorld
from echo2d.plan.kernel.scenario import MBIT
from echo2d_lab.bench.coordinator.bubble import (
    PER_STEP,
    SLOTS,
    T_TRAIN_S,
    WORKERS,
    Measured,
    demand,
    measure,
)
from echo2d_lab.research.artefacts import FIGURES, cell, read, write

Series = tuple[DisseminationMode, int]  # the mode, and the size of groups
SIDE_BY_SIDE: tuple[tuple[Series, ...], ...] = (
    (("background", 1), ("exclusive", 1)),
    (("background", 8), ("background", 16)),
)
# Target ratios, computed with earlier measurements; the CSV has the measured ones.
RATIOS = ((1.0, 0.7, 1.1, 0.9, 0.8, 1.2, 1.3), (1.0, 0.8, 1.2))
T_BCAST_S, STILL_S = 0.41, 0.37  # assumed before the first measurement
RUNS, BUBBLES, PICTURE = (FIGURES / name for name in ("bubble_run.csv", "bubble.csv", "bubble.png"))
SIMULATED_PERIODS = 200
LINK_MBPS = 1000.0  # of the simulated workers; the size of the version is chosen to give T_bcast
GEN_SIGMA = 0.1  # samples of the real engine are equally long, but share its speed with others


def pool(mode: DisseminationMode, ratio: float, known: Sequence[Measured] = ()) -> float:
    """The mu_pool for this ratio, if versions take as long as in the known points of this mode."""
    mine = [one for one in known if one.mode == mode]
    t_bcast_s = median(one.t_bcast_s for one in mine) if mine else T_BCAST_S
    still_s = median(one.still_s for one in mine) if mine else STILL_S
    needed = mu_min(demand(mode, T_TRAIN_S, t_bcast_s, still_s, 0.0, PER_STEP / T_TRAIN_S))
    assert needed is not None
    return ratio * needed


def run(path: Path) -> None:
    """Measure the points that the file lacks, two series at the same time."""
    asked = [
        (ratio, series)
        for series, ratios in zip(SIDE_BY_SIDE, RATIOS, strict=True)
        for ratio in ratios
    ]
    for done, (ratio, both) in enumerate(asked):
        rows: list[dict[str, Any]] = list(read(path))
        known = {
            (row["mode"], int(row["group_size"])) for row in rows if row["aimed_at"] == str(ratio)
        }
        missing = [each for each in both if each not in known]
        points = [measured(row) for row in rows]
        print(
            f"{ratio}, {len(asked) - done} to go: {missing or 'known'}", file=sys.stderr, flush=True
        )
        with ThreadPoolExecutor(len(both)) as side_by_side:
            found = side_by_side.map(
                measure,
                [mode for mode, _ in missing],
                [size for _, size in missing],
                [pool(mode, ratio, points) for mode, _ in missing],
            )
        rows += [{"aimed_at": str(ratio), **asdict(each)} for each in found]
        if missing:
            write(path, rows)


def measured(row: Mapping[str, str]) -> Measured:
    floats = ("mu_pool", "t_train_s", "t_bcast_s", "still_s", "pause_s", "bubble")
    ints = ("group_size", "periods", "max_staleness", "dropped", "spoiled")
    numbers: dict[str, Any] = {name: float(row[name]) for name in floats} | {
        name: int(row[name]) for name in ints
    }
    return Measured(mode="exclusive" if row["mode"] == "exclusive" else "background", **numbers)


def compared(points: Sequence[Measured]) -> Iterator[dict[str, Any]]:
    """The rows of the figure."""
    for point in sorted(points, key=lambda one: (one.group_size, one.mode, one.mu_pool)):
        needs = point.demand
        needed = mu_min(needs)
        assert needed is not None
        found = {
            "formula": bubble(needs, point.mu_pool),
            "simulated": simulated(needs, point.mu_pool, point.group_size),
            "measured": point.bubble,
        }
        yield {
            "mode": point.mode,
            "group_size": point.group_size,
            "mu_pool_over_mu_min": point.mu_pool / needed,
            "t_bcast_over_period": needs.t_bcast_s / needs.period_s,
            "lost_over_period": needs.lost_s / needs.period_s,
            **found,
            "spread": max(found.values()) - min(found.values()),
        }


def simulated(needs: Demand, mu_pool: float, group_size: int) -> float:
    """The bubble of the same workers in virtual time."""
    return float(FleetWorld(_fleet(needs, mu_pool, group_size)).run()["bubble"])


def _fleet(needs: Demand, mu_pool: float, group_size: int) -> FleetSpec:
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
                "gamma": 10.0,  # so large that all workers are active
            },
            "simulate": {
                "hours": SIMULATED_PERIODS * needs.period_s / 3600.0,
                "group_size": group_size,
                "gen_sigma": GEN_SIGMA,
                "train_sigma": 0.0,
            },
        }
    )


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    series = [each for both in SIDE_BY_SIDE for each in both]
    figure = Figure(figsize=(9, 7), layout="constrained")
    grid = figure.subplots(len(SIDE_BY_SIDE), 2, sharey=True).flat
    for axes, (mode, size) in zip(grid, series, strict=True):
        mine = [row for row in rows if (row["mode"], row["group_size"]) == (mode, size)]
        across = [row["mu_pool_over_mu_min"] for row in mine]
        for kind, style in {"formula": "k--", "simulated": "s-", "measured": "o-"}.items():
            axes.plot(across, [100 * row[kind] for row in mine], style, label=kind, markersize=5)
        axes.axvline(1.0, color="#999999", linewidth=0.8)
        title = f"{mode}, groups of {size}: {len(mine)} runs"
        axes.set(title=title, xlabel="mu_pool / mu_min", ylabel="bubble, %")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--run", action="store_true", help="measure the points that bubble_run.csv lacks"
    )
    # SIGTERM ends it like Ctrl-C, so that no program is left running.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if parser.parse_args().run:
        run(RUNS)
    rows = list(compared([measured(row) for row in read(RUNS)]))
    write(BUBBLES, rows)
    draw(rows, PICTURE)
    for row in rows:
        print(*(cell(value) for value in row.values()))


if __name__ == "__main__":
    main()
