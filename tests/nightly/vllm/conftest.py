"""One real vLLM server on the CPU for these tests, because it takes a minute to start; each engine uses it in turn."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from echo2d.engines.server.launch import Running
from echo2d.engines.server.process import ServerProcess
from echo2d.engines.vllm.client import VllmClient
from tests.support.engine_harness import save_random_model, tiny_config
from tests.support.lora import RANK
from tests.support.paths import REPO
from tests.support.vllm_servers import HEAD_DIM, launch

READY = Path(os.environ.get("ECHO2D_SERVERS", REPO / ".cache")) / "vllm" / "ready"
START_S_MAX = 900.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(1800))
            if not READY.exists():
                item.add_marker(
                    pytest.mark.skip(reason="no vLLM here: `make nightly-vllm` installs it")
                )


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def servers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[Running]]:
    folder = tmp_path_factory.mktemp("servers")
    await asyncio.to_thread(
        save_random_model, folder / "model", tiny_config(head_dim=HEAD_DIM), rng_seed=99
    )
    flags = ("--enable-lora", "--max-lora-rank", str(2 * RANK), "--max-loras", "4")
    process = ServerProcess(launch(folder / "0", *flags, "--max-cpu-loras", "4"))
    await process.start(folder / "model", "start")
    server = VllmClient(process.url, process.api_key, process.admin_key)
    try:
        async with asyncio.timeout(START_S_MAX):
            while not await server.ready():
                assert not process.ended, process.log.read_text()
                await asyncio.sleep(0.5)
        keys = (process.api_key, process.admin_key)
        yield [Running(process.url, folder / "adapters", *keys, private=process.private)]
    finally:
        await server.close()
        await process.stop()
