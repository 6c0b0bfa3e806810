"""Held adapters where engines differ: scores, mixtures of experts, and servers that have too little room."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import Qwen3MoeConfig

from echo2d.adapters import base_digest
from echo2d.core.protocol.control_messages import AnswerToScore
from echo2d.core.protocol.trajectory import pack_logprobs, pack_tokens
from echo2d.engines.base import AdapterBase, GenerateRequest
from echo2d.engines.layout import file_tensor_digests
from echo2d.engines.torch_engine import TorchEngine
from echo2d.errors import EngineFault
from tests.support.engine_contract import (
    ENDLESS,
    PROMPT,
    SHORT,
    Collected,
    check_logprobs,
    generated,
    running,
)
from tests.support.engine_harness import VOCAB_SIZE, label, save_random_model
from tests.support.held_contract import held, named, refit, writers
from tests.support.lora import AdapterHarness, write_adapter
from tests.support.sglang_double import SglangDouble
from tests.support.sglang_harness import AdapterDoubleHarness, DoubleHarness, fake_adapters


@pytest.fixture
def base(tmp_path: Path) -> AdapterBase:
    return fake_adapters(tmp_path)


@pytest.fixture
def torch_harness(tmp_path: Path) -> AdapterHarness:
    return AdapterHarness(tmp_path)


def to_score(output: Collected) -> list[AnswerToScore]:
    return [
        AnswerToScore(
            pack_tokens(PROMPT), pack_tokens(sample.tokens), pack_logprobs(sample.logprobs), 0, 0
        )
        for sample in output.samples
    ]


async def test_answers_are_scored_under_any_held_adapter(torch_harness: AdapterHarness) -> None:
    harness = torch_harness
    engine = harness.engine()
    await engine.start()
    await refit(harness, engine, 0)
    answers = to_score(await generated(engine, replace(SHORT, rng_seeds=(0, 0, 0))))
    await refit(harness, engine, 1, 0)
    for version, honest in ((0, True), (1, False)):
        found = await engine.score(answers, label=label(version), replay="torch")
        assert [each.k < 1e-5 for each in found] == [honest] * 3
        assert [each.missed == 0 for each in found] == [honest] * 3
    await refit(harness, engine, 2, 1)
    with pytest.raises(EngineFault, match=f"version {label(0)} is not held"):
        await engine.score(answers, label=label(0), replay="torch")
    await engine.close()


async def test_a_mixture_of_experts_holds_one_adapter(tmp_path: Path) -> None:
    """Its tokens do not stay in rows, so all rows of a pass have one."""
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "head_dim": 16,
    }
    counts = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    chosen = {"num_experts": 4, "num_experts_per_tok": 2, "eos_token_id": None}
    config = Qwen3MoeConfig(vocab_size=VOCAB_SIZE, **sizes, **counts, **chosen)
    folder = tmp_path / "base"
    await asyncio.to_thread(save_random_model, folder, config, rng_seed=0)
    digest = await asyncio.to_thread(base_digest, folder)
    base = AdapterBase(folder, digest, await asyncio.to_thread(file_tensor_digests, folder))
    engine = TorchEngine(threads=1)
    await engine.start()
    request = GenerateRequest("free", PROMPT, 1, 10_000)
    for version in (0, 1):
        adapter = tmp_path / str(version)
        await asyncio.to_thread(
            write_adapter, adapter, base, rng_seed=version, targets=["q_proj", "o_proj"]
        )
    await engine.refit(tmp_path / "0", label(0), base)
    async with running(engine, request, named(0, request)) as (free, own):
        report = await engine.refit(
            tmp_path / "1", label(1), replace(base, kept=frozenset(held(0)))
        )
        assert report.held_max == 1
        await own.until(lambda sample: sample.finish == "abort")
        await free.until(lambda sample: label(1) in sample.labels)
        await engine.check()
    assert (writers(own), writers(free)) == (held(0), held(0, 1))
    assert set(engine.held) == held(1)
    await engine.close()


async def test_a_full_server_ends_the_requests_under_dropped_adapters(
    base: AdapterBase, tmp_path: Path
) -> None:
    """Those under kept adapters go on."""
    base = replace(base, held_max=2)
    async with SglangDouble.serving(info={"max_loras_per_batch": 3}) as double:
        harness = AdapterDoubleHarness(tmp_path, [double], base)
        engine = harness.engine()
        await engine.start()
        assert (await refit(harness, engine, 0, most=2)).held_max == 2
        await refit(harness, engine, 1, 0, most=2)
        async with running(engine, named(0, ENDLESS), named(1, ENDLESS)) as (old, kept):
            await refit(harness, engine, 2, 1, most=2)
            seen = len(old.samples[0].tokens)
            await old.until(lambda sample: len(sample.tokens) > seen + 20)
            await refit(harness, engine, 3, 1, most=2)
            assert old.finishes() == ["abort"] * 2
            assert set(engine.held) == held(1, 3)
            assert double.adapters.keys() == held(1, 3)
            seen = len(kept.samples[0].tokens)
            await kept.until(lambda sample: len(sample.tokens) > seen + 20)
        for output in (old, kept):
            check_logprobs(harness, output)
        assert (writers(old), writers(kept)) == (held(0), held(1))
        await engine.check()
        await engine.close()


async def test_a_server_with_too_little_room_keeps_the_adapters_that_were_served_last(
    base: AdapterBase, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with SglangDouble.serving(info={"max_loras_per_batch": 3}) as double:
        harness = AdapterDoubleHarness(tmp_path, [double], base)
        engine = harness.engine()
        await engine.start()
        for version, expected in ((0, held(0)), (1, held(0, 1)), (2, held(1, 2))):
            await refit(harness, engine, version, 0, 1)
            assert set(engine.held) == expected
        assert "2 versions are held at once, and not 3" in caplog.text
        await engine.close()


async def test_a_server_that_lost_a_held_adapter_serves_nothing(
    base: AdapterBase, tmp_path: Path
) -> None:
    async with SglangDouble.serving() as double:
        harness = AdapterDoubleHarness(tmp_path, [double], base)
        engine = harness.engine()
        await engine.start()
        await refit(harness, engine, 0)
        await refit(harness, engine, 1, 0)
        for facts in (double.adapters, double.adapter_paths):
            facts.pop(label(0))  # another program has unloaded it
        assert (await generated(engine, named(0))).finishes() == ["abort"] * SHORT.samples
        assert (engine.label, set(engine.held)) == (None, set())
        await refit(harness, engine, 0)
        check_logprobs(harness, await generated(engine, named(0)))
        await engine.close()


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_a_server_writes_nothing_more_for_a_request_whose_whole_model_is_gone(
    tmp_path: Path, mode: str
) -> None:
    """Also where it would go on under the next one."""
    async with SglangDouble.serving() as double:
        harness = DoubleHarness(tmp_path, [double], refit_mode=mode)  # type: ignore[arg-type]
        engine = harness.engine()
        await engine.start()
        await engine.refit(harness.snapshot(0), label(0))
        async with running(engine, named(0, ENDLESS)) as (output,):
            live = list(double.live.values())
            await engine.refit(harness.snapshot(1), label(1))
            await output.until(lambda sample: sample.finish == "abort")
        assert writers(output) == held(0)
        assert max(len(each.output) for each in live) < ENDLESS.max_new_tokens
        check_logprobs(harness, output)
        assert writers(await generated(engine, named(1))) == held(1)
        await engine.check()
        await engine.close()
