"""The fake engine's policy can be recomputed, and the engine fails on request. The contract suite covers the rest."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic

import numpy as np
import pytest

from echo2d.core.worker.events import LabelSpan
from echo2d.engines.base import GenerateRequest, SampleOutput
from echo2d.engines.fake import FAKE_EOS, FakeEngine, FakePolicy, fake_logprob, fake_token
from echo2d.errors import EngineFault

PROMPT = [5, 6, 7]


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


async def serving(engine: FakeEngine, snapshot: Path, label: str = "1-a") -> FakeEngine:
    await engine.start()
    await engine.refit(snapshot, label)
    return engine


def request(
    samples: int = 3, max_new_tokens: int = 10, rng_seeds: Sequence[int] | None = None
) -> GenerateRequest:
    return GenerateRequest(
        "r", PROMPT, samples, max_new_tokens, stop_token_ids=(FAKE_EOS,), rng_seeds=rng_seeds
    )


async def deltas(engine: FakeEngine, request: GenerateRequest) -> list[SampleOutput]:
    return [delta async for delta in engine.generate(request)]


async def outputs(engine: FakeEngine, request: GenerateRequest) -> list[list[tuple[int, float]]]:
    """Tokens and logprobs of each sample."""
    joined: list[list[tuple[int, float]]] = [[] for _ in range(request.samples)]
    for delta in await deltas(engine, request):
        joined[delta.sample] += zip(delta.tokens, delta.logprobs, strict=True)
    return joined


def test_a_token_depends_on_every_input() -> None:
    base = fake_token("1-a", PROMPT, sample=0, rng_seed=0)
    others = [
        fake_token("2-b", PROMPT, sample=0, rng_seed=0),
        fake_token("1-a", [*PROMPT, 8], sample=0, rng_seed=0),
        fake_token("1-a", PROMPT, sample=1, rng_seed=0),
        fake_token("1-a", PROMPT, sample=0, rng_seed=1),
    ]
    assert base == fake_token("1-a", PROMPT, sample=0, rng_seed=0)
    assert base not in others


def test_a_logprob_is_exact_in_float32_and_negative() -> None:
    logprobs = [fake_logprob("1-a", PROMPT, token) for token in range(500)]
    assert all(-8 < logprob <= 0 and float(np.float32(logprob)) == logprob for logprob in logprobs)


async def test_every_token_can_be_computed_again(snapshot: Path) -> None:
    engine = await serving(
        FakeEngine(FakePolicy(rng_seed=4, answer_tokens=(99, 99), vocab_size=50, eos_token_id=50)),
        snapshot,
    )
    endless = replace(request(), stop_token_ids=())
    for sample, output in enumerate(await outputs(engine, endless)):
        context = list(PROMPT)
        assert len(output) == 10
        for written in output:
            assert written == fake_token("1-a", context, sample=sample, rng_seed=4, vocab_size=50)
            context.append(written[0])


async def test_the_seed_of_a_request_overrides_that_of_the_engine(snapshot: Path) -> None:
    engine = await serving(FakeEngine(FakePolicy(rng_seed=4)), snapshot)
    other = await serving(FakeEngine(FakePolicy(rng_seed=5)), snapshot)
    assert await outputs(engine, request()) != await outputs(other, request())
    seeded = request(rng_seeds=(6, 7, 8))
    assert await outputs(engine, seeded) == await outputs(other, seeded)


async def test_answers_end_within_their_length_range(snapshot: Path) -> None:
    engine = await serving(
        FakeEngine(FakePolicy(answer_tokens=(3, 6), vocab_size=1 << 30)), snapshot
    )
    answers = await outputs(engine, request(samples=50))
    assert {len(answer) for answer in answers} == {3, 4, 5, 6}
    assert {answer[-1][0] for answer in answers} == {FAKE_EOS}


async def test_spans_change_label_with_a_refit(snapshot: Path) -> None:
    engine = await serving(
        FakeEngine(FakePolicy(answer_tokens=(99, 99), vocab_size=1 << 30), bundle_tokens=3),
        snapshot,
    )
    stream = engine.generate(request(samples=2, max_new_tokens=8))
    seen = [await anext(stream), await anext(stream), await anext(stream)]
    await engine.refit(snapshot, "2-b")
    seen += [delta async for delta in stream]
    assert [delta.spans for delta in seen if delta.sample == 0] == [
        [LabelSpan(0, 3, "1-a")],
        [LabelSpan(3, 6, "1-a")],
        [LabelSpan(6, 8, "2-b")],
    ]


async def test_a_refit_ends_as_it_was_ordered_to(snapshot: Path) -> None:
    engine = FakeEngine(refit_outcomes=["done", "fails", "doubtful"])
    await serving(engine, snapshot)
    labels = [engine.label]
    for words in ("fail", "doubt"):
        with pytest.raises(EngineFault, match=words):
            await engine.refit(snapshot, "2-b")
        labels.append(engine.label)
    await engine.refit(snapshot, "2-b")
    assert [*labels, engine.label] == ["1-a", "1-a", None, "2-b"]


async def test_a_refit_takes_the_time_that_was_set(snapshot: Path) -> None:
    engine = await serving(FakeEngine(refit_s=0.02), snapshot)
    assert (await engine.refit(snapshot, "2-b")).pause_s == 0.02


async def test_a_refit_takes_as_long_as_the_tokens_that_it_computes_again(snapshot: Path) -> None:
    engine = await serving(FakeEngine(prefill_tokens_per_s=1000.0), snapshot)
    prompt = list(range(20))
    deltas = engine.generate(GenerateRequest("r", prompt, 1, 1000))
    await anext(deltas)
    report = await engine.refit(snapshot, "2-b")
    assert report.recomputed_tokens > len(prompt)
    assert report.recompute_s == pytest.approx(report.recomputed_tokens / 1000.0)
    await engine.close()
    assert [delta.finish async for delta in deltas][-1] == "abort"


async def test_tokens_come_at_the_pace_that_was_set(snapshot: Path) -> None:
    engine = await serving(
        FakeEngine(FakePolicy(answer_tokens=(99, 99), vocab_size=1 << 30), tokens_per_s=600),
        snapshot,
    )
    before = monotonic()
    await deltas(engine, request(samples=6, max_new_tokens=10))
    assert monotonic() - before >= 0.1


async def test_an_engine_on_hold_writes_no_tokens(snapshot: Path) -> None:
    """Each of ten steps takes 20 ms, whatever was under way when the engine was held."""
    engine = await serving(
        FakeEngine(FakePolicy(answer_tokens=(99, 99)), tokens_per_s=50), snapshot
    )
    before = monotonic()
    output = asyncio.create_task(deltas(engine, request(samples=1, max_new_tokens=10)))
    await asyncio.sleep(0.01)
    await engine.hold()
    await engine.hold()
    await asyncio.sleep(0.1)
    await engine.release()
    await output
    assert monotonic() - before >= 0.3
