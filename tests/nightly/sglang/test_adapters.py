"""Adapters on a real server: the contract, and requests that go on under the adapter with which they began."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from echo2d.engines.server.launch import Running
from echo2d.engines.server.process import ServerProcess
from tests.support.engine_contract import EngineContract
from tests.support.engine_harness import save_random_model, tiny_config
from tests.support.held_contract import HeldContract
from tests.support.kept_adapters import check_kept_adapters
from tests.support.lora import ALL_TARGETS, RANK
from tests.support.sglang_harness import SglangAdapterHarness
from tests.support.sglang_servers import launch, until_ready

WIDTH = {"intermediate_size": 64}  # SGLang does not pad it on a CPU


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def servers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[Running]]:
    """Two, because one row of the contract runs two engines."""
    folder = tmp_path_factory.mktemp("servers")
    save_random_model(folder / "model", tiny_config(**WIDTH), rng_seed=99)
    flags = (
        "--enable-lora", "--lora-backend", "torch_native", "--max-lora-rank", str(RANK), "--lora-target-modules",
        *ALL_TARGETS, "--max-loras-per-batch", "4", "--max-loaded-loras", "4",
    )  # fmt: skip
    processes = [ServerProcess(launch(folder / str(number), *flags)) for number in range(2)]
    for process in processes:
        await process.start(folder / "model", "start")
    try:
        for process in processes:
            await until_ready(process)
        yield [
            Running(each.url, folder / f"adapters-{number}", each.api_key, each.admin_key)
            for number, each in enumerate(processes)
        ]
    finally:
        for process in processes:
            await process.stop()


@pytest.fixture
def harness(tmp_path: Path, servers: list[Running]) -> SglangAdapterHarness:
    return SglangAdapterHarness(tmp_path, servers, **WIDTH)


class TestSglangEngineWithAdapters(EngineContract):
    """The module's fixture `harness` is used."""


class TestHeldAdaptersOfSglang(HeldContract):
    """The module's fixture `harness` is used."""


async def test_a_request_goes_on_under_its_adapter(harness: SglangAdapterHarness) -> None:
    await check_kept_adapters(harness)
