"""Requests that go on under the adapter with which they began, on the torch engine and on a double of SGLang."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from echo2d.engines.base import AdapterBase
from tests.support.engine_contract import ENDLESS, SHORT, check_logprobs, generated, running
from tests.support.engine_harness import label
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


async def test_an_adapter_that_is_loaded_is_served_again_without_a_load(
    base: AdapterBase, tmp_path: Path
) -> None:
    async with SglangDouble.serving() as double:
        harness = AdapterDoubleHarness(tmp_path, [double], replace(base, staleness_max=2))
        engine = harness.engine()
        await engine.start()
        for version in (0, 1, 1, 0):
            await engine.refit(harness.snapshot(version), label(version))
            output = await generated(engine, SHORT)
            assert {name for sample in output.samples for name in sample.labels} == {label(version)}
        assert [call for call in double.calls if call.startswith("load ")] == [
            f"load {label(0)}",
            f"load {label(1)}",
            f"load {label(0)}",  # no request needed it under version 1
        ]
        await engine.close()


async def test_a_server_that_lost_its_adapters_gets_base_and_adapter_anew(
    base: AdapterBase, tmp_path: Path
) -> None:
    async with SglangDouble.serving() as double:
        harness = AdapterDoubleHarness(tmp_path, [double], base)
        engine = harness.engine()
        await engine.start()
        await engine.refit(harness.snapshot(0), label(0))
        async with running(engine, ENDLESS) as (output,):
            double.cuts, double.shown = 1, "another program's"
            await output.until(lambda sample: sample.finish == "abort")
        assert engine.label is None
        check_logprobs(harness, output)
        await engine.refit(harness.snapshot(0), label(0))
        check_logprobs(harness, await generated(engine, SHORT))
        assert double.label.startswith("base-")
        await engine.close()
