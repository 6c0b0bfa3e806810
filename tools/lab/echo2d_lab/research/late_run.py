"""A run whose workers are killed and come back later, for `late_joiners`.

The coordinator is in this process; its seed, and workers with the fake engine, are processes on
loopback. Each worker counts the bytes that it receives (`counted_worker`).
"""

import asyncio
import random
import shutil
import time
import tomllib
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from echo2d.client import AsyncCoordinator
from echo2d.config.coordinator import CoordinatorConfig
from echo2d.core.cluster.events import Send
from echo2d.core.coordinator.events import CoordinatorAction, CoordinatorEvent
from echo2d.core.coordinator.state import CoordinatorState
from echo2d.core.protocol.control_messages import EncodeVersion
from echo2d.demo.processes import Program, Programs
from echo2d.runtime.coordinator.main import open_coordinator
from echo2d.runtime.run_dir.tokens import create_token
from echo2d.runtime.seed.supervisor import supervise_seed
from echo2d_lab.bench.lab import daemons, stub_task
from echo2d_lab.bench.lab.real_versions import RealVersions
from echo2d_lab.standins.snapshots import write_model

TASK = {"prompt_tokens": 4, "vocab_size": 512}
# A step has one trajectory, and none is generated while a version spreads.
POLICY = {"staleness_max": 0, "publish_every": 1, "trajectories_per_step": 1, "group_size": 1}
POLICY |= {"filter_zero_variance": False}


class Absence(NamedTuple):
    """The worker is killed while it serves `left`, and starts again when `back` has spread."""

    worker: int
    left: int
    back: int
    fresh: bool = False


class WatchedCore(CoordinatorState):
    """The real core. kinds: of the forms that the seed was ordered to encode."""

    kinds: ClassVar[dict[str, str]] = {}

    def handle(self, event: CoordinatorEvent, *, now: float) -> list[CoordinatorAction]:
        actions = super().handle(event, now=now)
        for each in actions:
            if isinstance(each, Send) and isinstance(order := each.message, EncodeVersion):
                is_copy = order.aside and order.kind == "delta"
                self.kinds[order.form] = "copy" if is_copy else order.kind
        return actions


class LateRun:
    """One run, with its files in `folder`. Each version is repeated until it has `size` bytes."""

    def __init__(self, folder: Path, versions: RealVersions, size: int) -> None:
        self._folder, self._versions, self._size = folder, versions, size
        self._programs, self._workers = Programs(folder / "logs"), dict[int, Program]()
        self._noted = Counter[int]()  # lines that were read of each worker's list of frames

    async def spread(self, count: int, workers: int, schedule: list[Absence]) -> dict[str, Any]:
        """Spread this many versions to this many workers. Returns the received bytes by worker and by form."""
        text = stub_task.config(self._folder, TASK, 4, POLICY, {"shape": "auto"})
        config = CoordinatorConfig.read(tomllib.loads(text))
        async with (
            open_coordinator(config, make_machine=_core) as opened,
            asyncio.TaskGroup() as tasks,
        ):
            self._opened = opened
            seed = supervise_seed(opened.seed, rng=random.Random(0))
            tasks.create_task(opened.coordinator.serve(seed))
            try:
                return await self._learn(count, workers, schedule)
            finally:
                await asyncio.to_thread(self._kill, [*self._workers])
                opened.coordinator.stop("the run is over")

    async def _learn(self, count: int, workers: int, schedule: list[Absence]) -> dict[str, Any]:
        stayed, late = Counter[str](), list[dict[str, Any]]()
        token = self._opened.run.path / "tokens" / "learner.token"
        await asyncio.to_thread(self._start, range(workers))
        async with AsyncCoordinator(self._opened.url, token_file=token) as learner:
            await learner.open_session(0)
            for version in range(count):
                if version:
                    batch = await learner.take_batch(version)
                    gone = [each.worker for each in schedule if each.left == version - 1]
                    await asyncio.to_thread(self._kill, gone)
                    await self._all_serve(version - 1)
                    await learner.commit(batch, t_train_s=0.0)
                await learner.publish(version, await asyncio.to_thread(self._snapshot, version))
                await self._all_serve(version)
                back = {each.worker: each for each in schedule if each.back == version}
                fresh = [worker for worker in back if back[worker].fresh]
                await asyncio.to_thread(self._start, back, fresh)
                await self._all_serve(version)
                taken = await asyncio.to_thread(self._taken)
                for worker, absence in back.items():
                    behind = None if absence.fresh else absence.back - absence.left
                    late.append({"behind": behind, **taken.pop(worker)})
                stayed += sum(taken.values(), Counter())
                print(f"  version {version}: {len(back)} of {len(self._workers)} late", flush=True)
        return {"stayed": stayed, "late": late}

    def _start(self, workers: Iterable[int], fresh: Collection[int] = ()) -> None:
        """Start workers. fresh: those that have lost their disk."""
        run, url, token = self._opened.run.path, self._opened.url, self._folder / "worker.token"
        if not token.exists():
            create_token(
                run, "late", role="worker", url=url, out=token, max_workers=None, expires="1d"
            )
        for worker in workers:
            state = self._folder / f"worker-{worker}"
            if worker in fresh:
                shutil.rmtree(state)
            program = ["-m", "echo2d_lab.research.counted_worker", f"{state}.frames", "join", url]
            flags = [f"--token-file={token}", f"--state-dir={state}", "--engine=fake"]
            self._workers[worker] = self._programs.start(state.name, *program, *flags)

    def _kill(self, workers: Iterable[int]) -> None:
        for worker in workers:
            self._workers.pop(worker).kill()

    def _taken(self) -> dict[int, Counter[str]]:
        """What each worker has received since the last call, by kind of form."""
        taken = {worker: Counter[str]() for worker in self._workers}
        for worker, received in taken.items():
            lines = (self._folder / f"worker-{worker}.frames").read_text().splitlines()
            for form, size in (line.split() for line in lines[self._noted[worker] :]):
                received[WatchedCore.kinds[form]] += int(size)
            self._noted[worker] = len(lines)
        return taken

    def _snapshot(self, version: int) -> Path:
        directory = self._folder / "snapshots" / str(version)
        weights = self._versions.weights(version, self._size // 2)
        parts = np.array_split(weights, daemons.SHARDS)
        write_model(directory, [part.data for part in parts])
        return directory

    async def _all_serve(self, version: int) -> None:
        """Wait until the workers that run, and no others, are connected and serve this version."""
        wanted = [version] * len(self._workers)
        async with asyncio.timeout(daemons.START_S):
            while wanted != [  # noqa: ASYNC110 - the core has no event for it
                row["serving"] and row["serving"]["version"]
                for row in daemons.alive(self._opened.coordinator.status())
            ]:
                await asyncio.sleep(daemons.POLL_S)


def _core(*of_run: Any) -> WatchedCore:
    return WatchedCore(*of_run, plan_secret=bytes(32), now=time.monotonic())
