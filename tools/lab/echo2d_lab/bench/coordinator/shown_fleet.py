"""A run to look at: a real coordinator with many scripted workers and a scripted learner.

    python -m echo2d_lab.bench.coordinator.shown_fleet FOLDER [--workers 500] [--rate 20] [--t-train 2]

It prints one line of JSON with the coordinator's url, its pid and a viewer's token file as soon as
every worker has joined, and runs until it is stopped. Only engines and learner are scripted: links,
leases, versions and the page's requests are those of any run.
"""

import argparse
import asyncio
import json
import logging
import signal
from pathlib import Path

import uvloop

from echo2d.demo.processes import Programs, wait_for
from echo2d.net.security.auth import read_token_file
from echo2d.runtime.run_dir.tokens import create_token
from echo2d_lab.bench.coordinator.fake_fleet import FakeFleet, Script
from echo2d_lab.bench.coordinator.load import VOCAB_SIZE, Load
from echo2d_lab.bench.coordinator.load_meter import LoadMeter
from echo2d_lab.standins.fake_learner import FakeLearner

START_S = 60.0
TOKENS = 200  # of an answer


async def serve(folder: Path, load: Load, t_train_s: float, programs: Programs) -> None:
    run = folder / "coordinator"
    (folder / "snapshots").mkdir(parents=True)
    config = folder / "run.toml"
    config.write_text(load.config(folder))
    coordinator = programs.start(
        "coordinator", "-m", "echo2d", "coordinate", "--config", str(config)
    )
    announced = await asyncio.to_thread(wait_for, run / "coordinator.json", programs, START_S)
    url = str(json.loads(announced)["url"])
    token_file = folder / "workers.token"
    create_token(
        run, "fleet", role="worker", url=url, out=token_file, max_workers=load.workers, expires="1d"
    )
    token = read_token_file(token_file)
    script = Script(load.slots, load.turn_tokens, VOCAB_SIZE, load.generate_s)
    fleet = FakeFleet(load.workers, script, LoadMeter(), rng_seed=0)
    learner = FakeLearner(
        url, run / "tokens" / "learner.token", folder / "snapshots", t_train_s=t_train_s
    )
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with asyncio.TaskGroup() as tasks:
        await fleet.enrol(url, token)
        await fleet.connect(url, bytes.fromhex(token.run_key), tasks)
        learner.start()
        viewer = run / "tokens" / "viewer.token"
        print(json.dumps({"url": url, "pid": coordinator.pid, "token": str(viewer)}), flush=True)
        await stopped.wait()
        await asyncio.to_thread(learner.stop)
        fleet.leave()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("folder", type=Path)
    options.add_argument("--workers", type=int, default=500)
    options.add_argument("--rate", type=float, default=20.0, help="trajectories/s of all together")
    options.add_argument("--t-train", type=float, default=2.0, help="seconds of a train step")
    chosen = options.parse_args()
    logging.disable(logging.WARNING)
    load = Load(workers=chosen.workers, rate=chosen.rate, tokens=TOKENS)
    with Programs(chosen.folder / "logs") as programs:
        uvloop.run(serve(chosen.folder, load, chosen.t_train, programs))


if __name__ == "__main__":
    main()
