"""What the contract of `echo2d.engines.base.Engine` says of several adapters that are held at once."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import pytest

from echo2d.core.protocol.sampling import Sampling
from echo2d.engines.base import AdapterBase, Engine, GenerateRequest, RefitReport
from echo2d.errors import EngineFault
from tests.support.engine_contract import (
    ENDLESS,
    SHORT,
    Collected,
    check_logprobs,
    generated,
    in_files,
    running,
)
from tests.support.engine_harness import Harness, label
from tests.support.lora import NARROW

HELD_MAX = 3


class HeldHarness(Harness, Protocol):
    """Its versions, 0 to NARROW at least, are adapters on one base."""

    base: AdapterBase


async def refit(
    harness: HeldHarness,
    engine: Engine,
    version: int,
    *kept: int,
    files: Path | None = None,
    most: int = HELD_MAX,
) -> RefitReport:
    """Serve a version, and keep others. files: another directory than that of the version."""
    base = replace(harness.base, kept=frozenset(map(label, kept)), held_max=most)
    return await engine.refit(files or harness.snapshot(version), label(version), base=base)


def named(version: int, request: GenerateRequest = SHORT, **changes: Any) -> GenerateRequest:
    """The request under this version, with an id of its own."""
    request_id = f"{request.request_id}-{version}"
    return replace(request, request_id=request_id, label=label(version), **changes)


def held(*versions: int) -> set[str]:
    return {label(version) for version in versions}


def writers(output: Collected) -> set[str]:
    return {name for sample in output.samples for name in sample.labels}


class HeldContract:
    """Subclasses give the fixture `harness`; `engine` serves adapter 0 of it."""

    @pytest.fixture
    async def engine(self, harness: HeldHarness) -> AsyncIterator[Engine]:
        engine = harness.engine()
        await engine.start()
        assert not engine.held
        await refit(harness, engine, 0)
        yield engine
        await engine.close()
        assert not engine.held

    async def test_held_adapters_of_several_ranks_write_together_what_each_writes_alone(
        self, harness: HeldHarness, engine: Engine
    ) -> None:
        await refit(harness, engine, 1, 0)
        await refit(harness, engine, NARROW, 0, 1)
        assert set(engine.held) == held(0, 1, NARROW)
        samplings = [Sampling(0.0), *([Sampling()] if harness.repeats else [])]
        for sampling in samplings:
            requests = [
                named(version, rng_seeds=(5, 9, 6), sampling=sampling) for version in (0, 1, NARROW)
            ]
            alone = [await generated(engine, request) for request in requests]
            together = await asyncio.gather(*(generated(engine, request) for request in requests))
            for request, one, other in zip(requests, alone, together, strict=True):
                assert writers(one) == writers(other) == {request.label}
                assert tokens(one) == tokens(other)
                check_logprobs(harness, one)
                check_logprobs(harness, other)
        await harness.check(engine)

    async def test_a_request_that_names_an_adapter_keeps_it_through_refits(
        self, harness: HeldHarness, engine: Engine
    ) -> None:
        """Also when the adapter is not held any more; then a new request is refused."""
        free = replace(ENDLESS, request_id="free")
        async with running(engine, named(0, ENDLESS), free) as (output, other):
            for version, kept in ((1, [0]), (2, [0]), (3, [])):
                await other.enough_of(version - 1)
                await refit(harness, engine, version, *kept)
                await harness.check(engine)
            with pytest.raises(EngineFault, match=f"version {label(0)} is not held"):
                await generated(engine, named(0))
            seen = max(len(sample.tokens) for sample in output.samples)
            await output.until(lambda sample: len(sample.tokens) > seen + 40)
            await other.enough_of(3)
        assert writers(output) == held(0)
        assert writers(other) == held(0, 1, 2, 3)
        check_logprobs(harness, output)
        check_logprobs(harness, other)

    async def test_samples_that_wait_keep_the_adapter_of_their_request(
        self, harness: HeldHarness
    ) -> None:
        engine = harness.engine(slots=2)
        await engine.start()
        for version, kept in ((0, []), (1, [0])):
            await refit(harness, engine, version, *kept)
        async with running(engine, named(1, ENDLESS)):  # in all slots
            waiting = asyncio.create_task(generated(engine, named(0)))
            await asyncio.sleep(0)
            await refit(harness, engine, 2, 1)
            await harness.check(engine)
            assert set(engine.held) == held(1, 2)
        output = await waiting
        assert output.finishes() == ["length"] * SHORT.samples
        assert writers(output) == held(0)
        check_logprobs(harness, output)
        await engine.close()

    async def test_a_kept_adapter_survives_a_refit_and_another_one_does_not(
        self, harness: HeldHarness, engine: Engine
    ) -> None:
        steps: Sequence[tuple[int, list[int], set[str]]] = (
            (1, [0], held(0, 1)),
            (2, [1], held(1, 2)),
            (3, [0, 1], held(1, 3)),  # adapter 0 does not come back
            (3, [1], held(1, 3)),
            (2, [], held(2)),
        )
        for version, kept, expected in steps:
            await refit(harness, engine, version, *kept)
            assert engine.label == label(version)
            assert set(engine.held) == expected
            for dropped in held(0, 1, 2, 3) - expected:
                with pytest.raises(EngineFault, match=f"version {dropped} is not held"):
                    await generated(engine, replace(SHORT, label=dropped))
        await harness.check(engine)

    async def test_a_refit_that_fails_drops_no_adapter(
        self, harness: HeldHarness, engine: Engine, tmp_path: Path
    ) -> None:
        await refit(harness, engine, 1, 0)
        with pytest.raises(EngineFault):
            await refit(harness, engine, 2, files=tmp_path / "nowhere")
        assert engine.label == label(1)
        assert set(engine.held) == held(0, 1)
        check_logprobs(harness, await generated(engine, named(0)))

    async def test_a_held_adapter_becomes_the_newest_without_a_load(
        self, harness: HeldHarness, engine: Engine, tmp_path: Path
    ) -> None:
        await refit(harness, engine, NARROW, 0)
        async with running(engine, named(NARROW, ENDLESS)) as (output,):
            report = await refit(harness, engine, 0, NARROW, files=tmp_path / "nowhere")
            assert (report.label, report.recomputed_tokens) == (label(0), 0)
            assert await harness.in_memory(engine) == await in_files(harness, 0)
            newest = await generated(engine, SHORT)
        assert engine.label == label(0)
        assert set(engine.held) == held(0, NARROW)
        assert (writers(newest), writers(output)) == (held(0), held(NARROW))
        check_logprobs(harness, newest)
        check_logprobs(harness, output)

    async def test_a_whole_model_is_held_alone(self, harness: HeldHarness, engine: Engine) -> None:
        await refit(harness, engine, 1, 0)
        async with running(engine, named(0, ENDLESS), named(1, ENDLESS)) as outputs:
            await engine.refit(harness.base.directory, label(9), base=None)
            for output in outputs:
                await output.until(lambda sample: sample.finish == "abort")
        assert [writers(output) for output in outputs] == [held(0), held(1)]
        assert (engine.label, set(engine.held)) == (label(9), held(9))
        for output in outputs:
            check_logprobs(harness, output)
        assert writers(await generated(engine, named(9))) == held(9)
        with pytest.raises(EngineFault, match="is not held"):
            await generated(engine, named(1))


def tokens(output: Collected) -> list[int]:
    """Those of all samples."""
    return list(chain(*(sample.tokens for sample in output.samples)))
