"""The README's figure: simulated broadcasts to more and more peers (`make figures`).

It simulates `scenarios/mixed.toml` with each shape and number of peers, keeps the results in
docs/measurements/scale.json, and draws docs/figures/scale.svg from them. Results in the JSON file are not computed
again; remove the file to repeat them.
"""

import argparse
import json
import math
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

from echo2d.plan.broadcast.world import CHECK_EVERY_LONG, World
from echo2d.plan.kernel.scenario_file import load_scenario

REPO = Path(__file__).parents[4]
SCENARIO = REPO / "scenarios" / "mixed.toml"
PEERS = (16, 64, 256, 1000)
CURVES = {  # colours by shape and size
    ("star", "80MB"): "#b5403c",
    ("chain", "80MB"): "#c98a1b",
    ("auto", "80MB"): "#2f6db5",
    ("auto", "1GiB"): "#2d8a57",
}
NAMES = {"star": "star", "chain": "one chain", "auto": "planned"}
Results = dict[str, dict[str, float]]


class Panel(NamedTuple):
    """One drawing with logarithmic axes. ticks: of the vertical axis."""

    title: str
    key: str
    ticks: tuple[int, ...]
    left: float


PANELS = (
    Panel("T_verify / lower bound", "ratio", (1, 2, 5, 10, 20, 50, 100, 200, 500), 60),
    Panel(
        "copies sent by the seed", "seed_copies", (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000), 460
    ),
)
WIDTH, HEIGHT, TOP = 300.0, 220.0, 40.0


def play(shape: str, size: str, peers: int) -> dict[str, float]:
    began = time.process_time()
    scenario = load_scenario(SCENARIO, peers=peers, bytes=size, shape=shape)
    outcome = World(scenario, check_every=10 * CHECK_EVERY_LONG).run()
    return {**outcome.facts(), "cpu_s": round(time.process_time() - began, 1)}


def measure(path: Path, peers_max: int, workers: int) -> Results:
    results: Results = json.loads(path.read_text()) if path.exists() else {}
    wanted = {
        f"{shape} {size} {peers}": (shape, size, peers) for peers in PEERS for shape, size in CURVES
    }
    with ProcessPoolExecutor(workers) as pool:
        missing = {
            pool.submit(play, *case): name
            for name, case in wanted.items()
            if name not in results and case[2] <= peers_max
        }
        for number, done in enumerate(as_completed(missing), start=1):
            results[missing[done]] = done.result()
            print(
                f"{number} of {len(missing)}:",
                missing[done],
                json.dumps(done.result()),
                flush=True,
            )
            path.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")
    return results


def points(results: Results, shape: str, size: str, key: str) -> list[tuple[int, float]]:
    return [
        (peers, found[key])
        for peers in PEERS
        if (found := results.get(f"{shape} {size} {peers}")) is not None
    ]


def svg(results: Results) -> str:
    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 345" font-family="sans-serif" font-size="12">',
        '<rect width="800" height="345" fill="#ffffff"/>',
    ]
    for panel in PANELS:
        lines += drawn(panel, results)
    for number, ((shape, size), colour) in enumerate(CURVES.items()):
        x = 60 + 180 * number
        lines.append(f'<rect x="{x}" y="320" width="16" height="4" fill="{colour}"/>')
        lines.append(f'<text x="{x + 22}" y="327">{NAMES[shape]}, {size}</text>')
    return "\n".join([*lines, "</svg>", ""])


def drawn(panel: Panel, results: Results) -> Iterator[str]:
    def across(peers: float) -> float:
        return panel.left + WIDTH * math.log(peers / PEERS[0]) / math.log(PEERS[-1] / PEERS[0])

    def up(value: float) -> float:
        return (
            TOP
            + HEIGHT
            - HEIGHT * math.log(value / panel.ticks[0]) / math.log(panel.ticks[-1] / panel.ticks[0])
        )

    yield f'<text x="{panel.left}" y="{TOP - 16}" font-weight="bold">{panel.title}</text>'
    for tick in panel.ticks:
        yield f'<path d="M{panel.left} {up(tick):.1f}h{WIDTH}" stroke="#dddddd"/>'
        yield f'<text x="{panel.left - 6}" y="{up(tick) + 4:.1f}" text-anchor="end">{tick}</text>'
    for peers in PEERS:
        yield f'<text x="{across(peers):.1f}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{peers:,}</text>'
    yield f'<text x="{panel.left + WIDTH / 2}" y="{TOP + HEIGHT + 36}" text-anchor="middle">peers</text>'
    for (shape, size), colour in CURVES.items():
        at = [
            (across(peers), up(max(1.0, value)))
            for peers, value in points(results, shape, size, panel.key)
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
        yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
        yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in at)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers-max", type=int, default=PEERS[-1], help="play no larger swarm")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="runs at a time")
    wanted = parser.parse_args()
    docs = REPO / "docs"
    results = docs / "measurements" / "scale.json"
    (docs / "figures" / "scale.svg").write_text(
        svg(measure(results, wanted.peers_max, wanted.workers))
    )


if __name__ == "__main__":
    main()
