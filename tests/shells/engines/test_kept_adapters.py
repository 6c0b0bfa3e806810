"""Requests that go on under the adapter with which they began, on the torch engine and on a double of SGLang."""

import asyncio
import json
import math
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from echo2d.engines.base import AdapterBase
from echo2d.engines.server import sampling_loop
from echo2d.engines.server.adapters import ServedAdapters
from echo2d.engines.server.launch import Running
from echo2d.engines.sglang.engine import SglangEngine
from echo2d.engines.torch_engine.policy import PreparedWeights
from echo2d.errors import EngineFault
from tests.support.engine_contract import ENDLESS, SHORT, check_logprobs, generated, running
from tests.support.engine_harness import label
from tests.support.kept_adapters import check_kept_adapters
from tests.support.lora import ALPHA, RANK, AdapterHarness, edited
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


async def test_an_adapter_without_room_leaves_the_one_before_it(
    harness: AdapterHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = harness.engine()
    await engine.start()
    await engine.refit(harness.snapshot(0), label(0))

    def full(*_: object) -> None:
        raise RuntimeError("CUDA out of memory")

    async with running(engine, ENDLESS) as (output,):
        with monkeypatch.context() as patch:
            patch.setattr(PreparedWeights, "on", full)
            with pytest.raises(EngineFault, match="no room for another adapter: CUDA out of"):
                await engine.refit(harness.snapshot(1), label(1))
        assert engine.label == label(0)
        seen = len(output.samples[0].tokens)
        await output.until(lambda sample: len(sample.tokens) > seen + 8)
        await engine.refit(harness.snapshot(2), label(2))
        await output.enough_of(2)
    check_logprobs(harness, output)
    await engine.close()


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


@asynccontextmanager
async def serving_version_0(
    folder: Path, base: AdapterBase, **options: Any
) -> AsyncIterator[tuple[SglangDouble, AdapterDoubleHarness, SglangEngine]]:
    """A double, its harness, and an engine that serves adapter 0."""
    async with SglangDouble.serving(**options) as double:
        harness = AdapterDoubleHarness(folder, [double], base)
        engine = harness.engine()
        await engine.start()
        await engine.refit(harness.snapshot(0), label(0))
        yield double, harness, engine
        await engine.close()


def directories(harness: AdapterDoubleHarness) -> set[str]:
    return {each.name for each in harness._folder.glob("*/adapters/*")}


async def test_a_server_gets_the_scale_and_the_layers_of_an_adapter_in_keys_that_it_reads(
    base: AdapterBase, tmp_path: Path
) -> None:
    """SGLang computes lora_alpha / r whatever use_rslora says, and refuses a pattern in target_modules."""
    async with serving_version_0(tmp_path, base) as (double, harness, engine):
        with edited(harness.snapshot(1) / "adapter_config.json") as written:
            written.update(use_rslora=True, target_modules=".*_proj", task_type="CAUSAL_LM")
        await engine.refit(harness.snapshot(1), label(1))
        kept = Path(double.adapter_paths[label(1)]) / "adapter_config.json"
        found = json.loads(await asyncio.to_thread(kept.read_bytes))
        assert found["lora_alpha"] / found["r"] == ALPHA / math.sqrt(RANK)
        plain = {"use_rslora": False, "target_modules": ["down_proj", "q_proj", "v_proj"]}
        assert found == {**written, "lora_alpha": found["lora_alpha"], **plain}
        check_logprobs(harness, await generated(engine, SHORT))


@pytest.mark.parametrize(
    ("targets", "missing"),
    [
        (("v_proj",), "q_proj"),
        (("k_proj", "o_proj"), "q_proj and v_proj"),
        (("q_proj", "k_proj"), "v_proj"),
        (("up_proj", "down_proj"), "gate_proj"),
        (("q_proj", "v_proj", "gate_proj"), ""),
    ],
)
async def test_adapters_that_would_end_sglang_at_a_request_are_refused_by_name(
    tmp_path: Path, targets: Sequence[str], missing: str
) -> None:
    base = await asyncio.to_thread(fake_adapters, tmp_path, targets)
    async with SglangDouble.serving() as double:
        harness = AdapterDoubleHarness(tmp_path, [double], base)
        engine = harness.engine()
        await engine.start()
        refusal = f"without {missing} beside it: add {missing} to learner.lora_targets"
        with pytest.raises(EngineFault, match=refusal) if missing else nullcontext():
            await engine.refit(harness.snapshot(0), label(0))
        assert ("update" in double.calls) == (not missing), "not even the base is loaded"
        await engine.close()


@pytest.mark.parametrize("targets", [["all"], ["q_proj", "gate_proj", "down_proj"], ["q_proj"]])
@pytest.mark.parametrize("place", ["base", "elsewhere"])
async def test_a_server_with_lora_on_experts_must_have_started_with_the_base(
    tmp_path: Path, targets: list[str], place: str
) -> None:
    """SGLang does not load the experts again, and reports the update as done."""
    names = [f"mlp.experts.0.{kind}" for kind in ("gate_proj", "down_proj")]
    base = await asyncio.to_thread(fake_adapters, tmp_path, names)
    info = {"enable_lora": True, "lora_target_modules": targets}
    async with SglangDouble.serving(info=info) as double:
        double.model_path = str(tmp_path / place)
        harness = AdapterDoubleHarness(tmp_path, [double], base)
        engine = harness.engine()
        await engine.start()
        keeps = targets != ["q_proj"]
        words = f"keeps the experts of .*/{place}: start it with --model-path"
        if keeps and place == "elsewhere":
            with pytest.raises(EngineFault, match=f"{words} {base.directory} "):
                await engine.refit(harness.snapshot(0), label(0))
            assert not double.updates
        else:
            await engine.refit(harness.snapshot(0), label(0))
            check_logprobs(harness, await generated(engine, SHORT))
        whole = SglangEngine(Running(double.url, tmp_path / "whole"))
        await whole.start()
        with pytest.raises(EngineFault, match=words) if keeps else nullcontext():
            await whole.refit(base.directory, "1-whole")
        for each in (engine, whole):
            await each.close()


async def test_a_version_that_the_server_refuses_is_not_kept_for_ever(
    base: AdapterBase, tmp_path: Path
) -> None:
    async with serving_version_0(tmp_path, base) as (double, harness, engine):
        for version in (1, 2, 3):
            double.refuses_adapters = True
            with pytest.raises(EngineFault, match="header too large"):
                await engine.refit(harness.snapshot(version), label(version))
        assert engine.label == label(0)
        kept = await asyncio.to_thread(directories, harness)
        assert kept == {label(0), label(3)}


async def test_a_worker_deletes_what_its_life_before_has_left(
    base: AdapterBase, tmp_path: Path
) -> None:
    async with SglangDouble.serving() as double:
        harness = AdapterDoubleHarness(tmp_path, [double], base)
        folder = tmp_path / double.url.rpartition(":")[2] / "adapters"
        for name in (label(0), f"{label(1)}.part"):
            (folder / name).mkdir(parents=True)
        engine = harness.engine()
        await engine.start()
        await engine.refit(harness.snapshot(2), label(2))
        assert await asyncio.to_thread(directories, harness) == {label(2)}
        check_logprobs(harness, await generated(engine, SHORT))
        await engine.close()


async def test_a_server_that_is_lost_while_an_adapter_is_copied_is_a_fault(
    base: AdapterBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving_version_0(tmp_path, base) as (double, harness, engine):
        copying, lost = threading.Event(), threading.Event()
        copy = ServedAdapters.copy

        def slow(self: ServedAdapters, *given: Any) -> Path:
            copying.set()
            lost.wait(10.0)
            return copy(self, *given)

        monkeypatch.setattr(ServedAdapters, "copy", slow)
        async with running(engine, ENDLESS) as (output,):
            refit = asyncio.create_task(engine.refit(harness.snapshot(1), label(1)))
            await asyncio.to_thread(copying.wait, 10.0)
            await double.die()
            await output.until(lambda sample: sample.finish == "abort")
            lost.set()
            with pytest.raises(EngineFault):
                await refit
        assert engine.label is None
        await engine.check()


async def test_a_server_with_room_for_fewer_adapters_cuts_requests_earlier(
    base: AdapterBase, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving_version_0(
        tmp_path, replace(base, staleness_max=6), info={"max_loras_per_batch": 3}
    ) as (double, harness, engine):
        async with running(engine, ENDLESS) as (output,):
            for version in (1, 2):
                await engine.refit(harness.snapshot(version), label(version))
            await output.enough_of(2)
        assert "requests are cut after 1 versions, and not after 6" in caplog.text
        double.info = {"max_loras_per_batch": 1}
        await engine.close()
        engine = harness.engine()
        await engine.start()
        with pytest.raises(EngineFault, match="holds 1 adapter at once, and a refit needs 2"):
            await engine.refit(harness.snapshot(3), label(3))
        await engine.close()


async def test_a_request_whose_abort_is_lost_does_not_hold_up_the_refit(
    base: AdapterBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling_loop, "CUT_S_MAX", 0.1)
    async with serving_version_0(tmp_path, replace(base, staleness_max=0)) as (
        double,
        harness,
        engine,
    ):
        async with running(engine, ENDLESS) as (output,):
            await output.enough_of(0)
            double.loses_aborts = 1
            await engine.refit(harness.snapshot(1), label(1))
            await output.enough_of(1)
        check_logprobs(harness, output)


async def test_a_server_that_lost_its_newest_adapter_serves_nothing(
    base: AdapterBase, tmp_path: Path
) -> None:
    async with serving_version_0(tmp_path, base) as (double, harness, engine):
        double.adapters.clear()
        double.adapter_paths.clear()  # another program has unloaded it
        output = await generated(engine, SHORT)
        assert {sample.finish for sample in output.samples} == {"abort"}
        assert engine.label is None
        await engine.refit(harness.snapshot(0), label(0))
        check_logprobs(harness, await generated(engine, SHORT))


async def test_a_server_that_lost_its_adapters_gets_base_and_adapter_anew(
    base: AdapterBase, tmp_path: Path
) -> None:
    async with serving_version_0(tmp_path, base) as (double, harness, engine):
        async with running(engine, ENDLESS) as (output,):
            double.cuts, double.shown = 1, "another program's"
            await output.until(lambda sample: sample.finish == "abort")
        assert engine.label is None
        check_logprobs(harness, output)
        await engine.refit(harness.snapshot(0), label(0))
        check_logprobs(harness, await generated(engine, SHORT))
        assert double.label.startswith("base-")
