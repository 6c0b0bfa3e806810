"""Measures what composed deltas save: `python -m echo2d_lab.research.late_joiners runs/rl/1e-6 runs/rl/1e-5`.

A real coordinator, its seed and workers (processes, on loopback) spread the versions of real runs
(`rl_updates.py`). Workers are killed and come back some versions later, some with an empty
disk; `--rng-seeds` draw which worker, when and for how long. Each schedule is run three times. A
worker that cannot use the delta that spreads takes

    full      the full form
    copies    a delta from a kept copy of its version, otherwise the full form
    composed  one of these, or a delta composed of kept ones, as echo2d does

A run is a line of JSON in OUT: the payload bytes that workers received, with segment tables,
by form (full; delta, which spreads; copy, a delta from an older version's copy; composed). A worker
that has come back is late until it serves the newest version. It prints a table of all lines in OUT.
"""

import argparse
import asyncio
import json
import random
import tempfile
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from echo2d.core.broadcast.catch_up_policy import DeltaRoute, choose_route
from echo2d_lab.bench.lab.real_versions import RealVersions
from echo2d_lab.research.late_run import Absence, LateRun

# The records that are hidden from `choose_route`.
HIDDEN = {"full": ("copies", "deltas"), "copies": ("deltas",), "composed": ()}
TITLES = (
    "lr", "versions away", "schedules", "late with a disk", "without", "composing saves, of what",
    "late with a disk take", "all late take", "all workers take",
)  # fmt: skip
CHOSEN = ("workers", "versions", "mib", "leave", "away", "fresh")  # options that each line has


def absences(options: argparse.Namespace, rng_seed: int) -> list[Absence]:
    """Draw the absences. Worker 0 never leaves, because one worker must generate."""
    rng, drawn = random.Random(rng_seed), list[Absence]()
    for worker in range(1, options.workers):
        version = 0
        while version < options.versions - 1:
            left, version = version, version + 1
            if rng.random() < options.leave:
                version = left + rng.randint(*options.away)
                drawn.append(Absence(worker, left, version, rng.random() < options.fresh))
    return drawn


def measure(options: argparse.Namespace, run: Path, rng_seed: int, routes: str) -> dict[str, Any]:
    """The line of one run."""
    hidden = dict.fromkeys(HIDDEN[routes], ())

    def route(*records: Any, **known: Any) -> DeltaRoute:
        return choose_route(*records, **known | hidden)

    with (
        tempfile.TemporaryDirectory(dir=options.out.parent) as folder,
        patch("echo2d.core.broadcast.catch_up_policy.choose_route", route),
    ):
        late_run = LateRun(Path(folder), RealVersions(run, options.versions), options.mib << 20)
        schedule = absences(options, rng_seed)
        result = asyncio.run(late_run.spread(options.versions, options.workers, schedule))
    chosen = {name: getattr(options, name) for name in CHOSEN}
    return {"run": run.name, "rng_seed": rng_seed, "routes": routes, **chosen, **result}


def received(line: dict[str, Any]) -> tuple[int, int, int]:
    """The bytes of late joiners that still had their disk, of all late joiners, of all workers."""
    late = [
        (each["behind"], sum(each[kind] for kind in each if kind != "behind"))
        for each in line["late"]
    ]
    with_disk = sum(size for behind, size in late if behind is not None)
    all_late = sum(size for _, size in late)
    return with_disk, all_late, all_late + sum(line["stayed"].values())


def table(lines: Iterable[dict[str, Any]]) -> Iterator[str]:
    """The rows of the table: what composing saves, as median, smallest and largest value over the schedules."""
    cases: dict[tuple[Any, ...], dict[int, dict[str, Any]]] = {}
    for line in lines:
        case = cases.setdefault((line["run"], *line["away"]), {})
        case.setdefault(line["rng_seed"], {})[line["routes"]] = line
    yield f"| {' | '.join(TITLES)} |"
    yield "| --- " * len(TITLES) + "|"
    for (run, least, most), schedules in cases.items():
        whole = [each for each in schedules.values() if len(each) == len(HIDDEN)]
        late = [each["behind"] for lines in whole for each in lines["composed"]["late"]]
        for other in ("full", "copies"):
            sizes = [(received(each[other]), received(each["composed"])) for each in whole]
            shares = [[less[of] / more[of] for more, less in sizes] for of in range(3)]
            saved = [[round(100 * (1 - each), 1) + 0.0 for each in of] for of in shares]
            cells = [f"{median(each):.1f} % ({min(each):.1f}-{max(each):.1f})" for each in saved]
            counts = [str(len(whole)), str(len(late) - late.count(None)), str(late.count(None))]
            yield f"| {' | '.join([run, f'{least}-{most}', *counts, f'`{other}`', *cells])} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", help="folders with v1, v2, ...")
    parser.add_argument("--out", type=Path, default=Path("runs/late_joiners.jsonl"))
    parser.add_argument("--rng-seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--versions", type=int, default=20, help="the last ones of each run")
    parser.add_argument("--mib", type=int, default=64, help="size to which a version is repeated")
    parser.add_argument("--leave", type=float, default=0.15, help="chance per worker and version")
    parser.add_argument("--away", type=int, nargs=2, default=[1, 6], help="versions: least, most")
    parser.add_argument("--fresh", type=float, default=0.2, help="share that lost its disk")
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for run, rng_seed, routes in product(options.runs, options.rng_seeds, HIDDEN):
        print(f"{run.name}, rng_seed {rng_seed}, {routes}", flush=True)
        line = measure(options, run, rng_seed, routes)
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    for row in table(json.loads(line) for line in options.out.read_text().splitlines()):
        print(row)


if __name__ == "__main__":
    main()
