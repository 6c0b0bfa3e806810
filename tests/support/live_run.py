"""A whole run in one process: the real coordinator, a seed, workers on real sockets, and a learner that sleeps.

    async with a_run(tmp_path, {"policy.staleness_max": 8}, t_train_s=0.2) as run:
        async with a_worker(run, tmp_path / "one", paced(240.0)):
            await run.until(lambda facts: facts["committed_step"] >= 4)

Engines are fake and write at a set rate; everything else is real.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from echo2d.config.coordinator import CoordinatorConfig
from echo2d.core.coordinator.events import Recovered
from echo2d.core.rules.run import RunRules
from echo2d.engines.fake import FakeEngine, FakePolicy
from echo2d.runtime.coordinator.loop import Machine
from echo2d.runtime.coordinator.main import Opened, core_machine, open_coordinator
from echo2d.runtime.seed.main import Seed
from echo2d_lab.standins.fake_learner import FakeLearner
from tests.support.control_link import worker_token
from tests.support.polling import HANG_S

TOKENS, VOCAB = 8, 512  # every trajectory has this many tokens: the minimum of a fake engine
HEARTBEAT_S = 0.2  # a killed worker is noticed after three of them
LOOK_S = 0.02
Facts = dict[str, Any]


def config_of_run(folder: Path, prices: dict[str, float], **changes: Any) -> CoordinatorConfig:
    document: dict[str, Any] = {
        "run": {"run_dir": str(folder / "run"), "snapshot_root": str(folder / "out")},
        "coordinator": {"port": 0},
        "policy": {
            "staleness_max": 8,
            "publish_every": 1,
            "trajectories_per_step": 4,
            "group_size": 1,
            "filter_zero_variance": False,
        },
        "sampling": {"vocab_size": VOCAB, "max_new_tokens": TOKENS},
        "task": {
            "kind": "echo2d_lab.bench.lab.stub_task:StubTask",
            "options": {"prompt_tokens": 4, "vocab_size": VOCAB},
            "processes": 1,
        },
        "dissemination": {"shape": "chain"},
        "price": [{"workers": name, "usd_per_h": usd_per_h} for name, usd_per_h in prices.items()],
    }
    for name, value in changes.items():
        table, _, key = name.partition(".")
        document.setdefault(table, {})[key] = value
    return CoordinatorConfig.read(document)


def paced(trajectories_per_s: float, *, refit_s: float = 0.0) -> FakeEngine:
    return FakeEngine(
        FakePolicy(answer_tokens=(TOKENS, TOKENS)),
        tokens_per_s=TOKENS * trajectories_per_s,
        slots=4,
        refit_s=refit_s,
    )


class Run:
    """A run, its status, and tokens for its workers."""

    def __init__(self, opened: Opened, seed: Seed, learner: FakeLearner) -> None:
        self.opened, self.seed, self._learner = opened, seed, learner
        self.url = opened.url

    @property
    def steps(self) -> int:
        """The number of steps that the learner has committed."""
        return self._learner.steps

    def token(self, path: Path, name: str) -> Path:
        worker_token(self.opened.run.path, self.url, name, out=path)
        return path

    def status(self) -> Facts:
        return self.opened.coordinator.status()

    def workers(self) -> dict[str, Facts]:
        """The status rows of the joined workers, by name."""
        return {row["name"]: row for row in self.status()["workers"] if row["state"] == "joined"}

    def active(self) -> set[str]:
        return {name for name, row in self.workers().items() if row["active"]}

    async def until(self, holds: Callable[[Facts], bool]) -> Facts:
        """Wait for a status for which `holds` is true. Returns it."""
        async with asyncio.timeout(HANG_S):
            while not holds(facts := self.status()):
                assert self._learner.fault is None
                await asyncio.sleep(LOOK_S)
        return facts

    async def go_on(self, steps: int) -> Facts:
        """Wait until the learner has committed this many further steps."""
        wanted = self.steps + steps
        return await self.until(lambda _: self.steps >= wanted)


@asynccontextmanager
async def a_run(
    folder: Path,
    changes: dict[str, Any] | None = None,
    *,
    t_train_s: float,
    prices: dict[str, float] | None = None,
) -> AsyncIterator[Run]:
    """changes: other keys of its config."""
    config = config_of_run(folder, prices or {}, **(changes or {}))
    async with (
        open_coordinator(config, make_machine=_with_quick_heartbeats) as opened,
        asyncio.TaskGroup() as tasks,
    ):
        serving = tasks.create_task(opened.coordinator.serve())
        seed = await asyncio.to_thread(Seed, opened.seed)
        seeding = tasks.create_task(seed.run())
        learner = await asyncio.to_thread(
            FakeLearner,
            opened.url,
            opened.run.path / "tokens" / "learner.token",
            folder / "out",
            t_train_s=t_train_s,
        )
        learner.start()
        try:
            yield Run(opened, seed, learner)
        finally:
            await asyncio.to_thread(learner.stop)
            seeding.cancel()
            opened.coordinator.stop("the test ends")
            await serving


def _with_quick_heartbeats(rules: RunRules, recovered: Recovered) -> Machine:
    return core_machine(replace(rules, heartbeat_s=HEARTBEAT_S), recovered)
