"""Requests that go on under the adapter with which they began, on the torch engine and on a double of SGLang."""

import asyncio
from pathlib import Path

import pytest

from echo2d.engines.base import AdapterBase
from tests.support.kept_adapters import check_kept_adapters
from tests.support.lora import AdapterHarness
from tests.support.sglang_double import SglangDouble
from tests.support.sglang_harness import AdapterDoubleHarness, fake_adapters


@pytest.fixture
def harness(tmp_path: Path) -> AdapterHarness:
    return AdapterHarness(tmp_path)


@pytest.fixture
def base(tmp_path: Path) -> AdapterBase:
    return fake_adapters(tmp_path)


async def test_the_torch_engine_computes_rows_of_several_adapters(harness: AdapterHarness) -> None:
    await check_kept_adapters(harness)


async def test_sglang_is_asked_for_the_adapter_of_each_request(
    base: AdapterBase, tmp_path: Path
) -> None:
    async with SglangDouble.serving() as double:
        await check_kept_adapters(AdapterDoubleHarness(tmp_path, [double], base))
        kept = await asyncio.to_thread(
            lambda: {each.name for each in tmp_path.glob("*/adapters/*")}
        )
    loads = [call.split()[1] for call in double.calls if call.startswith("load ")]
    unloads = [call.split()[1] for call in double.calls if call.startswith("unload ")]
    assert loads == [f"{version}-{version:012x}" for version in range(5)]
    assert set(unloads) <= set(loads) - kept
    assert not [call for call in double.calls if call.startswith("pause")][1:], "only for the base"
