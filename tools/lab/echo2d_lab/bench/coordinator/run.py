"""`echo2d bench coordinator`: measures a real coordinator with many workers; only engines and learner are scripted.

    this process                                                other processes, as in any run
    N scripted workers: enrolment, control links --WebSocket--> echo2d coordinate: SQLite ledger, task process, seed
    a scripted learner: batches, commits, versions ----HTTP-->

A *lease latency* is the time for which a slot of a worker stays empty: from the moment its result is handed to the
control link until the LeaseGranted arrives that fills the slot again (first freed, first filled). It includes both ways
through this process, the ledger's transaction, and the wait until enough slots for a whole group are free. Everything
else of a run happens meanwhile: progress of every lease, heartbeats, batches, a new version after each train step.
"""

import asyncio
import gc
import json
import logging
import signal
import tempfile
import time
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import Progress

from echo2d.demo.processes import Program, Programs, wait_for
from echo2d.errors import Fault, first_fault
from echo2d.net.security.auth import read_token_file
from echo2d.runtime.run_dir.tokens import create_token
from echo2d_lab.bench.coordinator.bombers import Bomber, StatusProbe, attack
from echo2d_lab.bench.coordinator.fake_fleet import FakeFleet, Script
from echo2d_lab.bench.coordinator.load import GROUP_SIZE, VOCAB_SIZE, Load
from echo2d_lab.bench.coordinator.load_meter import PARTS, LoadMeter, rss_mb
from echo2d_lab.bench.coordinator.load_result import STALE_SLOT_S, LoadResult, print_figures
from echo2d_lab.standins.fake_learner import FakeLearner

START_S = 60.0  # the coordinator must listen within this time, also on a busy machine
FULL_S = 120.0  # every slot must have been leased once within this time
WARM_S = 10.0  # seconds of load before the measurement
STOPPED = 130  # exit code after Ctrl-C, as in a shell


def run_coordinator_bench(load: Load, *, as_json: bool) -> int:
    """Measure and print. Returns the exit code: 0, or 1 if the load was not sustained."""
    import uvloop

    logging.disable(logging.WARNING)  # a thousand links would log too much
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="echo2d-bench-") as folder,
            Programs(Path(folder) / "logs") as programs,
            View(load, hidden=as_json) as view,
        ):
            result = uvloop.run(_Run(load, Path(folder), programs, view).measure())
    except KeyboardInterrupt:
        return STOPPED
    shortcomings = result.shortcomings(load)
    if not as_json:
        print_figures(result, load)
        return 1 if shortcomings else 0
    print(json.dumps(result.as_dict()))
    console = Console(stderr=True)
    for text in shortcomings:
        console.print(f"not the load that was asked for: {text}", highlight=False)
    return 1 if shortcomings else 0


class View:
    """A progress bar on stderr."""

    def __init__(self, load: Load, *, hidden: bool) -> None:
        self._progress = Progress(console=Console(stderr=True), transient=True, disable=hidden)
        self._task = self._progress.add_task("starting", total=load.seconds)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, text: str, done_s: float = 0.0) -> None:
        self._progress.update(self._task, description=text, completed=done_s)


class _Run:
    """One measurement in a run directory of its own."""

    def __init__(self, load: Load, folder: Path, programs: Programs, view: View) -> None:
        self._load = load
        self._folder = folder
        self._programs = programs
        self._view = view
        self._meter = LoadMeter()
        self._took: dict[str, float] = {}

    async def measure(self) -> LoadResult:
        gc.disable()  # its pauses would look like the coordinator's
        load, run = self._load, self._folder / "coordinator"
        coordinator, url = await asyncio.to_thread(self._start_coordinator)
        token_file = self._folder / "workers.token"
        await asyncio.to_thread(self._make_token, url, token_file)
        token = await asyncio.to_thread(read_token_file, token_file)
        script = Script(load.slots, load.turn_tokens, VOCAB_SIZE, load.generate_s)
        fleet = FakeFleet(load.workers, script, self._meter, rng_seed=0)
        learner_token = run / "tokens" / "learner.token"
        learner = FakeLearner(url, learner_token, self._folder / "snapshots")
        bombers = [Bomber(f"bomber-{number}") for number in range(load.bombers)]
        probe = StatusProbe(url, learner_token)
        try:
            async with asyncio.TaskGroup() as tasks:
                await self._timed("enrolling", fleet.enrol(url, token))
                await self._timed(
                    "connecting", fleet.connect(url, bytes.fromhex(token.run_key), tasks)
                )
                learner.start()
                try:
                    await self._fill(fleet, learner)
                    asking = tasks.create_task(probe.run())
                    tasks.create_task(attack(bombers, url, token))
                    probe.measuring = True
                    steps = await self._load_for(coordinator.pid, learner)
                    probe.measuring = False
                    asking.cancel()
                    empty = fleet.empty_for(STALE_SLOT_S, time.monotonic())
                    return LoadResult.of(
                        self._load, self._meter, slots_empty=empty, steps=steps, took=self._took,
                        memory_mb=rss_mb(coordinator.pid), probe=probe, bombers=bombers,
                    )  # fmt: skip
                finally:
                    for bomber in bombers:
                        bomber.leave()
                    await asyncio.to_thread(learner.stop)
                    fleet.leave()
        except* Fault as faults:
            raise first_fault(faults) from None

    def _start_coordinator(self) -> tuple[Program, str]:
        (self._folder / "snapshots").mkdir()
        config = self._folder / "run.toml"
        config.write_text(self._load.config(self._folder))
        program = self._programs.start(
            "coordinator", "-m", "echo2d", "coordinate", "--config", str(config)
        )
        announced = json.loads(
            wait_for(self._folder / "coordinator" / "coordinator.json", self._programs, START_S)
        )
        return program, str(announced["url"])

    def _make_token(self, url: str, path: Path) -> None:
        run_dir, workers = self._folder / "coordinator", self._load.workers + self._load.bombers
        create_token(
            run_dir, "fleet", role="worker", url=url, out=path, max_workers=workers, expires="1d"
        )

    async def _timed(self, what: str, work: Any) -> None:
        self._view.show(what)
        loop = asyncio.get_running_loop()
        start = loop.time()
        await work
        self._took[what] = loop.time() - start

    async def _fill(self, fleet: FakeFleet, learner: FakeLearner) -> None:
        """Wait until all slots but those of one group are leased, and then WARM_S."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + FULL_S
        while (running := fleet.running) < fleet.slots - GROUP_SIZE:
            self._view.show(f"leasing {running}/{fleet.slots} slots")
            if loop.time() > deadline:
                raise Fault(
                    f"after {FULL_S:.0f} s only {running} of {fleet.slots} slots are leased"
                )
            self._check(learner)
            await asyncio.sleep(0.1)
        self._view.show("warming up")
        await asyncio.sleep(min(WARM_S, self._load.seconds))

    async def _load_for(self, pid: int, learner: FakeLearner) -> int:
        """Measure for the requested time. Returns the train steps in it."""
        before, part_s = learner.steps, self._load.seconds / PARTS
        self._meter.measuring = True
        self._meter.cut(pid)
        for part in range(1, PARTS + 1):
            self._view.show("measuring", done_s=(part - 1) * part_s)
            await asyncio.sleep(part_s)
            self._check(learner)
            self._meter.cut(pid)
        self._meter.measuring = False
        return learner.steps - before

    def _check(self, learner: FakeLearner) -> None:
        self._programs.check()
        if learner.fault is not None:
            raise learner.fault
