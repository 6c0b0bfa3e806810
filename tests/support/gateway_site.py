"""A coordinator whose gateway is enabled, with a seed, version 0 of a model, and workers with fake engines."""

import asyncio
import json
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from shutil import copy
from typing import Any

import openai

from echo2d.core.coordinator.events import CoordinatorAction, CoordinatorEvent, Recovered
from echo2d.core.coordinator.state import PLAN_SECRET_BYTES, CoordinatorState
from echo2d.core.rules.run import RunRules
from echo2d.engines.fake import FakeEngine, FakePolicy
from echo2d.net.security.auth import write_token_file
from echo2d.runtime.coordinator.loop import Machine
from echo2d.runtime.coordinator.main import Opened, open_coordinator
from echo2d.runtime.seed.main import Seed
from echo2d.runtime.worker.main import Worker
from tests.support.peer import a_worker
from tests.support.polling import HANG_S
from tests.support.scripted_core import learner, make_config, make_snapshot

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}>"


class Site:
    """A coordinator with the gateway on, its seed, and version 0 of a model. It is a `Home` of tests.support.peer."""

    def __init__(self, opened: Opened, directory: Path, stack: AsyncExitStack) -> None:
        self.url = opened.url
        self.directory = directory
        self.opened, self.coordinator = opened, opened.coordinator
        self.engines: dict[str, FakeEngine] = {}
        self._stack = stack

    def token(self, path: Path, name: str, role: str = "worker") -> Path:
        write_token_file(path, self.coordinator._access.create(name, role))
        return path

    async def worker(
        self, name: str, *, tokens_per_s: float | None = None, **policy: Any
    ) -> Worker:
        made = self.engines[name] = FakeEngine(
            FakePolicy(**{"vocab_size": 17, **policy}), tokens_per_s=tokens_per_s
        )
        return await self._stack.enter_async_context(
            a_worker(self, self.directory / name, made, name=name)
        )

    async def secret(self, name: str = "user", role: str = "gateway") -> str:
        path = await asyncio.to_thread(self.token, self.directory / f"{name}.token", name, role)
        found: str = json.loads(await asyncio.to_thread(path.read_text))["secret"]
        return found

    async def client(self) -> openai.AsyncOpenAI:
        client = openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key=await self.secret(), max_retries=0
        )
        return await self._stack.enter_async_context(client)

    async def serve(self, workers: int) -> None:
        """Wait until this many workers serve version 0."""
        await until(
            lambda: (
                sum(bool(row["serving"]) for row in self.coordinator.status()["workers"]) >= workers
            )
        )

    @property
    def facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = self.coordinator.status()["gateway"]
        return facts

    async def calls_ended(self) -> None:
        await until(lambda: not self.facts["calls"])


class Checked(CoordinatorState):
    """Checks its invariants after every event."""

    def handle(self, event: CoordinatorEvent, *, now: float) -> list[CoordinatorAction]:
        actions = super().handle(event, now=now)
        self.check()
        return actions


def checked(rules: RunRules, recovered: Recovered) -> Machine:
    return Checked(
        rules, recovered, plan_secret=secrets.token_bytes(PLAN_SECRET_BYTES), now=time.monotonic()
    )


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(HANG_S):
        while not holds():
            await asyncio.to_thread(os.sched_yield)


@asynccontextmanager
async def a_site(
    directory: Path, template: str = TEMPLATE, /, **changes: Any
) -> AsyncIterator[Site]:
    path = directory / "chat.jinja"
    await asyncio.to_thread(path.write_text, template)
    gateway = {
        "gateway.enabled": True,
        "gateway.chat_template": path,
        "gateway.share": 0.5,
        **changes,
    }
    config = make_config(directory, **gateway)
    async with AsyncExitStack() as stack:
        opened = await stack.enter_async_context(open_coordinator(config, make_machine=checked))
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        tasks.create_task(opened.coordinator.serve())
        seed = await asyncio.to_thread(Seed, opened.seed)
        seeding = tasks.create_task(seed.run())
        if opened.coordinator.status()["newest_version"] is None:
            async with learner(config.run.run_dir, opened) as trainer:
                await trainer.open_session(0)
                await asyncio.to_thread(make_snapshot, directory / "out" / "0")
                if (base := config.run.base_model) is not None:
                    for file in ("tokenizer.json", "tokenizer_config.json"):
                        await asyncio.to_thread(copy, base / file, directory / "out" / "0")
                await trainer.publish(0, directory / "out" / "0")
        try:
            async with AsyncExitStack() as inner:
                yield Site(opened, directory, inner)
        finally:
            seeding.cancel()
            opened.coordinator.stop("the test ends")
