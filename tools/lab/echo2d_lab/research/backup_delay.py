"""Measures how long events of a loaded coordinator wait while its run is backed up, compared with no backup.

    python -m echo2d_lab.research.backup_delay --workers 100 --rate 100 --rounds 4

It starts `echo2d bench coordinator`, and sends that coordinator 50 requests a second, which go through
its mailbox, its core and its ledger's turn, as any event does. Windows without a backup and windows in
which `echo2d keep backup` runs again and again take turns in one run, so that both have the same machine.
Figures of both include the time for which the asking process itself waits for a processor.
"""

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from echo2d.client import AsyncCoordinator

WINDOW_S, PAUSE_S, ASK_S = 8.0, 0.02, 0.050
START_S = 90.0


async def ask(client: AsyncCoordinator, until: float) -> list[float]:
    """Milliseconds of each answer."""
    took = []
    while time.monotonic() < until:
        began = time.monotonic()
        await client.evaluations()
        took.append(1000.0 * (time.monotonic() - began))
        await asyncio.sleep(max(0.0, PAUSE_S - (time.monotonic() - began)))
    return took


async def back_up(run_dir: Path, folder: Path, until: float) -> int:
    """Back the run up again and again. Returns the number of backups."""
    count = 0
    while time.monotonic() < until:
        target = folder / "backup"
        program = ["-m", "echo2d", "keep", "backup", f"--run-dir={run_dir}", f"--to={target}"]
        process = await asyncio.create_subprocess_exec(sys.executable, *program, stdout=-3)
        assert await process.wait() == 0
        count += 1
        await asyncio.to_thread(shutil.rmtree, target)
    return count


def announced(folder: Path) -> list[Path]:
    return list(folder.glob("echo2d-bench-*/coordinator/coordinator.json"))


async def windows(bench_folder: Path, folder: Path, rounds: int) -> None:
    run_dir = bench_folder / "coordinator"
    url = json.loads((run_dir / "coordinator.json").read_text())["url"]
    token = run_dir / "tokens" / "learner.token"
    took: dict[str, list[float]] = {"without": [], "during": []}
    backups = 0
    async with AsyncCoordinator(url, token_file=token) as client:
        for _ in range(rounds):
            took["without"] += await ask(client, time.monotonic() + WINDOW_S)
            until = time.monotonic() + WINDOW_S
            found, count = await asyncio.gather(ask(client, until), back_up(run_dir, folder, until))
            took["during"] += found
            backups += count
    size = sum(path.stat().st_size for path in run_dir.glob("ledger.sqlite*"))
    print(f"{backups} backups; the ledger has {size / 1e6:.1f} MB; load {os.getloadavg()[0]:.1f}")
    for name, values in took.items():
        p50, p99, p999 = np.percentile(values, [50, 99, 99.9])
        slow = sum(value > 1000 * ASK_S for value in values)
        print(
            f"{name:8} {len(values)} answers: p50 {p50:.1f} ms, p99 {p99:.1f}, p99.9 {p999:.1f}, "
            f"max {max(values):.1f}; {slow} over {1000 * ASK_S:.0f} ms"
        )


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=100)
    parser.add_argument("--rate", type=float, default=100.0)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    seconds = START_S + 3 * WINDOW_S * options.rounds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        load = [
            f"--workers={options.workers}",
            f"--rate={options.rate}",
            f"--tokens={options.tokens}",
        ]
        bench = await asyncio.create_subprocess_exec(
            "env", f"TMPDIR={name}", sys.executable, "-m", "echo2d", "bench", "coordinator", *load,
            f"--seconds={seconds}", "--json", stdout=-3,
        )  # fmt: skip
        try:
            deadline = time.monotonic() + START_S
            while not (found := announced(folder)):
                assert time.monotonic() < deadline, "the coordinator does not start"
                await asyncio.sleep(0.2)
            # In this time the fleet joins, and the ledger fills.
            await asyncio.sleep(40.0)
            await windows(found[0].parents[1], folder, options.rounds)
        finally:
            bench.terminate()
            await bench.wait()


if __name__ == "__main__":
    asyncio.run(main())
