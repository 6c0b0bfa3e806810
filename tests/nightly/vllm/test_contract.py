"""The engine keeps its contract with a real server, for whole models and for adapters."""

from pathlib import Path

import pytest

from echo2d.engines.server.launch import Running
from tests.support.engine_contract import EngineContract
from tests.support.engine_harness import Harness
from tests.support.held_contract import HeldContract
from tests.support.kept_adapters import check_kept_adapters
from tests.support.vllm_servers import VllmAdapterHarness, VllmHarness


class OneServer(EngineContract):
    test_two_engines_of_one_process_do_not_meet = None  # type: ignore[assignment]


class TestVllmEngine(OneServer):
    @pytest.fixture
    def harness(self, tmp_path: Path, servers: list[Running]) -> Harness:
        return VllmHarness(tmp_path, servers)


@pytest.fixture
def harness(tmp_path: Path, servers: list[Running]) -> VllmAdapterHarness:
    return VllmAdapterHarness(tmp_path, servers)


class TestVllmEngineWithAdapters(OneServer):
    """The module's fixture `harness` is used."""


class TestHeldAdaptersOfVllm(HeldContract):
    """The module's fixture `harness` is used."""


async def test_a_request_goes_on_under_its_adapter(
    harness: VllmAdapterHarness,
) -> None:
    await check_kept_adapters(harness)
