"""The coordinator's shell on real sockets and files, around a core that a test scripts, or any other core."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from echo2d.client import AsyncCoordinator
from echo2d.config.coordinator import CoordinatorConfig
from echo2d.core.base.ids import PeerId
from echo2d.core.cluster.events import Reply
from echo2d.core.cluster.step_history import StepSummary
from echo2d.core.coordinator.events import (
    CoordinatorAction,
    CoordinatorEvent,
    EpochAsked,
    Recovered,
)
from echo2d.core.coordinator.glance import Glance, TreeView
from echo2d.core.rules.run import RunRules
from echo2d.core.status.schema import EarnedStatus, Status
from echo2d.runtime.coordinator.main import MakeMachine, Opened, open_coordinator
from echo2d.tasks.sort_digits import write_tokenizer
from tests.support.coordinator_world import World
from tests.support.polling import HANG_S


class Script:
    """A core that answers each kind of event as the test says, and records all events. Every epoch is in force."""

    def __init__(self) -> None:
        self.on: dict[type, Callable[[Any], list[CoordinatorAction]]] = {}
        self.heard: asyncio.Queue[CoordinatorEvent] = asyncio.Queue()
        self.wake: float | None = None
        self.seed_is_here = False
        self.recovered: Recovered | None = None
        self.rules: RunRules | None = None

    def make(self, rules: RunRules, recovered: Recovered) -> "Script":
        self.rules, self.recovered = rules, recovered
        return self

    def handle(self, event: CoordinatorEvent, *, now: float) -> list[CoordinatorAction]:
        if isinstance(event, EpochAsked):
            return [Reply(event.request, 200, {})]
        self.heard.put_nowait(event)
        return self.on[type(event)](event) if type(event) in self.on else []

    def wake_at(self) -> float | None:
        return self.wake

    def seed_alive(self) -> bool:
        return self.seed_is_here

    def status(self, *, now: float) -> Status:
        """The status of a run in which nothing has happened."""
        return World().state.status(now=now)

    def earned(self, workers: Iterable[PeerId]) -> EarnedStatus:
        return EarnedStatus()

    def glance(self) -> Glance:
        return World().state.glance()

    def tree(self, stripe: int) -> TreeView | None:
        return None

    def step_summary(self, step: int) -> StepSummary | None:
        return None

    async def hears(self, kind: type) -> Any:
        """The next event of this kind; events of other kinds are skipped."""
        while not isinstance(event := await self.heard.get(), kind):
            pass
        return event


def make_config(tmp_path: Path, **changes: Any) -> CoordinatorConfig:
    document: dict[str, dict[str, Any]] = {
        "run": {"run_dir": str(tmp_path / "run"), "snapshot_root": str(tmp_path / "out")},
        "coordinator": {"port": 0},
        "link": {"port": 0},
        "policy": {"trajectories_per_step": 4, "group_size": 2},
        "sampling": {"vocab_size": 17},
        "task": {"kind": "sort_digits", "processes": 1},
    }
    for name, value in changes.items():
        table, _, key = name.partition(".")
        document.setdefault(table, {})[key] = value
    return CoordinatorConfig.read(document)


def make_snapshot(path: Path, value: float = 0.0) -> Path:
    path.mkdir(parents=True)
    save_file({"w": np.full(64, value, dtype=np.float32)}, path / "model.safetensors")
    (path / "config.json").write_text('{"vocab_size": 17}')
    write_tokenizer(path)
    return path


@asynccontextmanager
async def serving(config: CoordinatorConfig, make_machine: MakeMachine) -> AsyncIterator[Opened]:
    async with (
        open_coordinator(config, make_machine=make_machine) as opened,
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(opened.coordinator.serve())
        try:
            yield opened
        finally:
            opened.coordinator.stop("the test ends")


@asynccontextmanager
async def learner(run_dir: Path, opened: Opened) -> AsyncIterator[AsyncCoordinator]:
    token_file = run_dir / "tokens" / "learner.token"
    async with AsyncCoordinator(opened.url, token_file=token_file, timeout_s=HANG_S) as made:
        yield made


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def config(tmp_path: Path) -> CoordinatorConfig:
    return make_config(tmp_path)


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def run_dir(config: CoordinatorConfig) -> Path:
    return config.run.run_dir
