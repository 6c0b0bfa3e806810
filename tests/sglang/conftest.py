"""Real SGLang servers on the CPU for these tests: started once, two at most, each used by one engine at a time."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from echo2d.engines.server.process import ServerProcess
from echo2d.engines.sglang.client import SglangClient
from echo2d.engines.sglang.launch import Launch
from echo2d.engines.sglang.server import Running
from tests.support.engine_harness import save_random_model, tiny_config
from tests.support.paths import REPO

PYTHON = REPO / "tools" / "sglang_cpu" / "python"
READY = REPO / ".cache" / "sglang" / "ready"
FLAGS = ("--dtype", "float32", "--max-total-tokens", "400000", "--max-running-requests", "64")
START_S_MAX = 900.0  # half a minute on a machine that does nothing else


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.sglang)
            item.add_marker(pytest.mark.timeout(1800))
            if not READY.exists():
                item.add_marker(
                    pytest.mark.skip(reason="no SGLang here: `make sglang-test` installs it")
                )


def launch(folder: Path, *flags: str) -> Launch:
    return Launch(PYTHON, (*FLAGS, *flags), folder, dict(os.environ))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def servers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[Running]]:
    folder = tmp_path_factory.mktemp("servers")
    await asyncio.to_thread(
        save_random_model, folder / "model", tiny_config(intermediate_size=64), rng_seed=99
    )
    processes = [ServerProcess(launch(folder / str(number))) for number in range(2)]
    for process in processes:
        await process.start(folder / "model", "start")
    try:
        for process in processes:
            await until_ready(process)
        yield [Running(each.url, each.api_key, each.admin_key) for each in processes]
    finally:
        for process in processes:
            await process.stop()


async def until_ready(process: ServerProcess) -> None:
    server = SglangClient(process.url, api_key=process.api_key, admin_key=process.admin_key)
    try:
        async with asyncio.timeout(START_S_MAX):
            while not await server.ready():
                assert not process.ended, process.log.read_text()
                await asyncio.sleep(0.5)
    finally:
        await server.close()
