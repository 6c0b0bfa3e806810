"""Every engine keeps the contract of `echo2d.engines.base`."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from echo2d.engines.base import AdapterBase
from tests.support.engine_contract import EngineContract
from tests.support.engine_harness import FakeHarness, Harness, Int8Harness, TorchHarness
from tests.support.held_contract import HeldContract, HeldHarness
from tests.support.lora import AdapterHarness
from tests.support.sglang_double import SglangDouble
from tests.support.sglang_harness import (
    AdapterDoubleHarness,
    DoubleHarness,
    FakeAdapterHarness,
    fake_adapters,
)


class TestFakeEngine(EngineContract):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> Harness:
        return FakeHarness(tmp_path)


class TestTorchEngine(EngineContract):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> Harness:
        return TorchHarness(tmp_path)


class TestTorchEngineInInt8(EngineContract):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> Harness:
        return Int8Harness(tmp_path)


class TestTorchEngineWithAdapters:
    """What weights have to do with; how adapters are refused is in `test_adapters.py`."""

    engine = EngineContract.engine
    test_idle = EngineContract.test_an_idle_engine_changes_version_and_weights
    test_memory = EngineContract.test_digests_are_of_the_memory_not_of_the_files
    test_between_tokens = EngineContract.test_versions_change_between_two_tokens
    test_doubt = EngineContract.test_a_doubtful_refit_leaves_nothing_until_the_next

    @pytest.fixture
    def harness(self, tmp_path: Path) -> Harness:
        return AdapterHarness(tmp_path)


@pytest.fixture
def base(tmp_path: Path) -> AdapterBase:
    return fake_adapters(tmp_path)


class TestHeldAdaptersOfTheFakeEngine(HeldContract):
    @pytest.fixture
    def harness(self, tmp_path: Path, base: AdapterBase) -> HeldHarness:
        return FakeAdapterHarness(tmp_path, base)


class TestHeldAdaptersOfTheTorchEngine(HeldContract):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> HeldHarness:
        return AdapterHarness(tmp_path)


class TestHeldAdaptersOfSglangOnADouble(HeldContract):
    @pytest.fixture
    async def harness(self, tmp_path: Path, base: AdapterBase) -> AsyncIterator[HeldHarness]:
        async with SglangDouble.serving() as double:
            double.adapters_max = 4
            yield AdapterDoubleHarness(tmp_path, [double], base)


class TestSglangEngineWithAdaptersOnADouble(EngineContract):
    @pytest.fixture
    async def harness(self, tmp_path: Path, base: AdapterBase) -> AsyncIterator[Harness]:
        async with SglangDouble.serving() as one, SglangDouble.serving() as other:
            yield AdapterDoubleHarness(tmp_path, [one, other], base)


class TestSglangEngineOnADouble(EngineContract):
    """Over HTTP; `make nightly-sglang` does the same with real servers."""

    @pytest.fixture(params=["incremental", "cumulative"])
    async def harness(
        self, request: pytest.FixtureRequest, tmp_path: Path
    ) -> AsyncIterator[Harness]:
        async with AsyncExitStack() as stack:
            incremental = request.param == "incremental"
            serving = [SglangDouble.serving(incremental=incremental) for _ in range(2)]
            yield DoubleHarness(
                tmp_path, [await stack.enter_async_context(each) for each in serving]
            )
