"""Requests that go on under the adapter with which they began, on every engine that holds several."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from echo2d.engines.base import AdapterBase, Engine
from tests.support.engine_contract import ENDLESS, PROMPT, check_logprobs, running
from tests.support.engine_harness import Harness, label
from tests.support.lora import AdapterHarness
from tests.support.sglang_double import SglangDouble
from tests.support.sglang_harness import AdapterDoubleHarness, fake_adapters

STALENESS_MAX = 2
OTHER = replace(ENDLESS, request_id="other", prompt=PROMPT[::-1])


@pytest.fixture(params=["torch", "sglang"])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> AdapterHarness | AdapterBase:
    """Blocking work comes first: the harness of the torch engine, or the adapters of a double."""
    return AdapterHarness(tmp_path) if request.param == "torch" else fake_adapters(tmp_path)


@pytest.fixture
async def harness(made: AdapterHarness | AdapterBase, tmp_path: Path) -> AsyncIterator[Harness]:
    if isinstance(made, AdapterHarness):
        yield made
        return
    async with SglangDouble.serving() as double:
        yield AdapterDoubleHarness(tmp_path, [double], made)


@pytest.fixture
async def engine(harness: AdapterHarness | AdapterDoubleHarness) -> AsyncIterator[Engine]:
    base = replace(harness.base, staleness_max=STALENESS_MAX)
    harness.base = base
    engine = harness.engine()
    await engine.start()
    await engine.refit(harness.snapshot(0), label(0))
    yield engine
    await harness.check(engine)
    await engine.close()


async def test_a_request_goes_on_under_its_adapter_while_its_tokens_count(
    harness: Harness, engine: Engine
) -> None:
    async with running(engine, ENDLESS) as (old,):
        for version in (1, 2):
            report = await engine.refit(harness.snapshot(version), label(version))
            assert report.recomputed_tokens == 0
        seen = [len(sample.tokens) for sample in old.samples]
        async with running(engine, OTHER) as (new,):
            await new.enough_of(2)
            await old.until(lambda sample: len(sample.tokens) > max(seen) + 40)
            assert {name for sample in old.samples for name in sample.labels} == {label(0)}
            report = await engine.refit(harness.snapshot(3), label(3))
            assert report.recomputed_tokens >= sum(seen)
            await old.enough_of(3)
            await engine.refit(harness.snapshot(1), label(4))
            assert {name for sample in new.samples for name in sample.labels} == {label(2)}
    for sample in old.samples:
        assert list(dict.fromkeys(sample.labels)) == [label(0), label(3)]
    check_logprobs(harness, old)
    check_logprobs(harness, new)
