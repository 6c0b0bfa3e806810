"""T_verify over the number of workers, for a star and for the chosen plan: docs/figures/t_bcast.{csv,png}.

`python -m echo2d_lab.research.broadcast_figure` takes a minute. The learner's host sends 1 Gbit/s (star,
limited), or as much as the workers can receive (star, unlimited). The figures are predictions of the
planner, as in `echo2d plan`; the chosen plan is also simulated frame by frame
(`echo2d.plan.broadcast.world`), up to PLAYED_MAX workers.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from echo2d.core.weights.form import frame_bytes_for
from echo2d.plan.broadcast.world import CHECK_EVERY_LONG, World
from echo2d.plan.fleet.forecast import Ablation, BroadcastForecasts
from echo2d.plan.fleet.spec import MBPS_MAX, FleetSpec, read_fleet
from echo2d.plan.kernel.scenario import MBIT, PeerSpec, Scenario
from echo2d_lab.research.artefacts import FIGURES, cell, write

TIMES, PICTURE = FIGURES / "t_bcast.csv", FIGURES / "t_bcast.png"
WORKERS = (2, 4, 8, 16, 32, 64, 128, 256)
PLAYED_MAX = 16
LEARNER_MBPS = 1000.0
WIRE_BYTES = 320_000_000  # a delta of 2 % of 16 GB
RTT_MS = 50.0


class Lines(NamedTuple):
    """The line of every worker, Mbit/s."""

    name: str
    uplink_mbps: float
    downlink_mbps: float


LINES = (Lines("homes", 100, 400), Lines("rented", 1000, 1000))


def fleet_of(lines: Lines, workers: int, learner_mbps: float) -> FleetSpec:
    return read_fleet(
        {
            "learner": {
                "t_train_s": 100,
                "trajectories_per_step": 256,
                "staleness_max": 4,
                "uplink_mbps": learner_mbps,
            },
            "model": {"params": WIRE_BYTES, "bytes_per_param": 1},
            "fleet": [
                {
                    "name": "w",
                    "count": workers,
                    "trajectories_per_h": 360,
                    "uplink_mbps": lines.uplink_mbps,
                    "downlink_mbps": lines.downlink_mbps,
                    "rtt_ms": RTT_MS,
                }
            ],
        }
    )


def times(lines: Lines, workers: int) -> dict[str, Any]:
    """A row of the table, in seconds."""
    limited = BroadcastForecasts(fleet_of(lines, workers, LEARNER_MBPS), Ablation()).broadcast(
        {"w": workers}
    )
    free = BroadcastForecasts(fleet_of(lines, workers, MBPS_MAX), Ablation()).broadcast(
        {"w": workers}
    )
    return {
        "lines": lines.name,
        "workers": workers,
        "star_limited_s": limited.star_s,
        "star_unlimited_s": free.star_s,
        "echo2d_s": limited.planned_s,
        "echo2d_played_s": played(lines, workers) if workers <= PLAYED_MAX else "",
        "bound_s": limited.bound_s,
    }


def played(lines: Lines, workers: int) -> float:
    """T_verify of the same broadcast, simulated with every frame and relay."""
    latency_s = RTT_MS / 4000.0  # one way, to the middle of the network
    seed = PeerSpec(LEARNER_MBPS * MBIT, LEARNER_MBPS * MBIT, 0.0)
    worker = PeerSpec(lines.uplink_mbps * MBIT, lines.downlink_mbps * MBIT, latency_s)
    frame_bytes = frame_bytes_for(WIRE_BYTES)
    scenario = Scenario((seed, *(worker,) * workers), WIRE_BYTES, frame_bytes=frame_bytes)
    return World(scenario, check_every=CHECK_EVERY_LONG).run().t_verify_s


def rows() -> Iterator[dict[str, Any]]:
    wanted = [(lines, workers) for lines in LINES for workers in WORKERS]
    for number, (lines, workers) in enumerate(wanted, start=1):
        print(
            f"{number} of {len(wanted)}: {lines.name}, {workers} workers",
            file=sys.stderr,
            flush=True,
        )
        yield times(lines, workers)


def draw(found: Sequence[Mapping[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    styles = {
        "star_limited_s": "o-",
        "star_unlimited_s": "s-",
        "echo2d_s": "^-",
        "echo2d_played_s": "rx",
        "bound_s": "k--",
    }
    for axes, lines in zip(figure.subplots(1, len(LINES), sharey=True), LINES, strict=True):
        mine = [row for row in found if row["lines"] == lines.name]
        for name, style in styles.items():
            points = [(row["workers"], row[name]) for row in mine if row[name] != ""]
            axes.plot(
                *zip(*points, strict=True),
                style,
                label=name.removesuffix("_s").replace("_", " "),
                markersize=5,
            )
        axes.set(xscale="log", yscale="log", xlabel="workers", ylabel="T_verify, s", xticks=WORKERS)
        axes.set_xticklabels([str(count) for count in WORKERS])
        axes.minorticks_off()
        axes.set_title(
            f"{lines.name}: {lines.uplink_mbps:g} Mbit/s up, {lines.downlink_mbps:g} down",
            fontsize=10,
        )
        axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)


def main() -> None:
    found = list(rows())
    write(TIMES, found)
    draw(found, PICTURE)
    for row in found:
        print(*(cell(value) for value in row.values()), sep="\t")


if __name__ == "__main__":
    main()
