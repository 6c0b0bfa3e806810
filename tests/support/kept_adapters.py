"""The check that requests go on under the adapter with which they began, for every engine that holds several."""

from dataclasses import replace
from typing import Any

from tests.support.engine_contract import ENDLESS, PROMPT, check_logprobs, running
from tests.support.engine_harness import label

STALENESS_MAX = 2
OTHER = replace(ENDLESS, request_id="other", prompt=PROMPT[::-1])


async def check_kept_adapters(harness: Any) -> None:
    """harness: one with adapters, before it made an engine."""
    harness.base = replace(harness.base, staleness_max=STALENESS_MAX)
    engine = harness.engine()
    await engine.start()
    await engine.refit(harness.snapshot(0), label(0))
    async with running(engine, ENDLESS) as (old,):
        for version in (1, 2):
            report = await engine.refit(harness.snapshot(version), label(version))
            assert (report.pause_s < 1.0, report.recomputed_tokens) == (True, 0)
        seen = [len(sample.tokens) for sample in old.samples]
        async with running(engine, OTHER) as (new,):
            await new.enough_of(2)
            await old.until(lambda sample: len(sample.tokens) > max(seen) + 40)
            assert {name for sample in old.samples for name in sample.labels} == {label(0)}
            report = await engine.refit(harness.snapshot(3), label(3))
            assert report.recomputed_tokens >= sum(seen)
            await old.enough_of(3)
            # Version 4 has the weights of version 1, and 2 is not too old for it.
            await engine.refit(harness.snapshot(1), label(4))
            seen = [len(sample.tokens) for sample in new.samples]
            await new.until(lambda sample: len(sample.tokens) > max(seen) + 40)
            assert {name for sample in new.samples for name in sample.labels} == {label(2)}
    for sample in old.samples:
        assert list(dict.fromkeys(sample.labels))[:2] == [label(0), label(3)]
    for output in (old, new):
        check_logprobs(harness, output)
    await harness.check(engine)
    await engine.close()
