"""Real SGLang servers on the CPU for these tests: started once, two at most, each used by one engine at a time.

CI runs the rows of the engine contract in PROBE, each with one engine, on one server (`-m probe`).
"""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from echo2d.engines.server.launch import Running
from echo2d.engines.server.process import ServerProcess
from tests.support.engine_harness import save_random_model, tiny_config
from tests.support.paths import REPO
from tests.support.sglang_servers import launch, until_ready

PROBE = (
    "test_nothing_is_generated_before_the_first_refit",
    "test_an_idle_engine_changes_version_and_weights",
    "test_digests_are_of_the_memory_not_of_the_files",
    "test_every_sample_is_whole[1.0]",
    "test_greedy_is_deterministic",
    "test_versions_change_between_two_tokens",
    "test_abort_takes_an_exact_id",
    "test_a_failed_refit_keeps_the_old_version[missing tensor]",
)
READY = Path(os.environ.get("ECHO2D_SERVERS", REPO / ".cache")) / "sglang" / "ready"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(1800))
            if item.name in PROBE and item.path.name == "test_contract.py":
                item.add_marker(pytest.mark.probe)
            if not READY.exists():
                item.add_marker(
                    pytest.mark.skip(reason="no SGLang here: `make nightly-sglang` installs it")
                )


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def servers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[list[Running]]:
    folder = tmp_path_factory.mktemp("servers")
    count = 1 if request.config.getoption("markexpr") == "probe" else 2
    await asyncio.to_thread(
        save_random_model, folder / "model", tiny_config(intermediate_size=64), rng_seed=99
    )
    processes = [ServerProcess(launch(folder / str(number))) for number in range(count)]
    for process in processes:
        await process.start(folder / "model", "start")
    try:
        for process in processes:
            await until_ready(process)
        # Versions of the first are written into memory, those of the second are loaded from disk.
        yield [
            Running(each.url, folder, each.api_key, each.admin_key, private=private)
            for each, private in zip(processes, (processes[0].private, None), strict=False)
        ]
    finally:
        for process in processes:
            await process.stop()
