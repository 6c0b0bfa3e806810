"""Real SGLang servers on the CPU for these tests: started once, two at most, each used by one engine at a time."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from echo2d.engines.server.process import ServerProcess
from echo2d.engines.sglang.server import Running
from tests.support.engine_harness import save_random_model, tiny_config
from tests.support.paths import REPO
from tests.support.sglang_servers import launch, until_ready

READY = REPO / ".cache" / "sglang" / "ready"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.sglang)
            item.add_marker(pytest.mark.timeout(1800))
            if not READY.exists():
                item.add_marker(
                    pytest.mark.skip(reason="no SGLang here: `make sglang-test` installs it")
                )


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
