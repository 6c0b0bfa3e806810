"""A worker's engine scores other workers' answers with the version that it serves, while it generates."""

import asyncio
from pathlib import Path

import pytest

from echo2d.core.base.ids import Digest, Version, version_label
from echo2d.core.protocol.control_messages import AnswerToScore, ScoreAnswers
from echo2d.core.protocol.trajectory import pack_logprobs, pack_tokens
from echo2d.engines.base import GenerateRequest, ScoringEngine
from echo2d.engines.fake import FakeEngine
from echo2d.engines.torch_engine.engine import TorchEngine
from echo2d.errors import EngineFault
from echo2d.runtime.audit.scoring import score_order
from tests.support.engine_harness import save_random_model, tiny_config

VERSION, DIGEST = Version(3), Digest(bytes(32))
PROMPT, TOKENS = (3, 4, 5), 10


async def written(engine: TorchEngine, samples: int) -> list[AnswerToScore]:
    request = GenerateRequest("own", PROMPT, samples, TOKENS, rng_seeds=range(samples))
    found = {sample: (list[int](), list[float]()) for sample in range(samples)}
    async for output in engine.generate(request):
        tokens, logprobs = found[output.sample]
        tokens += output.tokens
        logprobs += output.logprobs
    return [
        AnswerToScore(pack_tokens(PROMPT), pack_tokens(tokens), pack_logprobs(logprobs), 0, seed)
        for seed, (tokens, logprobs) in found.items()
    ]


@pytest.fixture
async def engine(tmp_path: Path) -> TorchEngine:
    await asyncio.to_thread(save_random_model, tmp_path, tiny_config(), rng_seed=0)
    engine = TorchEngine(threads=1)
    await engine.start()
    await engine.refit(tmp_path, version_label(VERSION, DIGEST))
    return engine


async def test_scores_have_the_order_of_the_answers(engine: TorchEngine) -> None:
    answers = await written(engine, 5)
    # Of different length, so that they are packed in another order.
    short = AnswerToScore(answers[0].prompt, answers[0].tokens[:8], answers[0].logprobs[:8], 0, 0)
    asked = (answers[4], short, answers[2])
    order = ScoreAnswers(7, VERSION, DIGEST, "", "torch", asked)
    running = asyncio.create_task(written(engine, 8))
    scored = await score_order(engine, order, loading_s=0.5)
    assert (scored.order, scored.loading_s) == (7, 0.5)
    assert [each.tokens for each in scored.found] == [TOKENS, 2, TOKENS]
    assert all(each.missed == 0 and each.k < 1e-5 for each in scored.found)
    assert len(await running) == 8
    await engine.close()


async def test_answers_of_another_version_are_not_scored(engine: TorchEngine) -> None:
    answers = tuple(await written(engine, 1))
    order = ScoreAnswers(7, Version(4), DIGEST, "", "torch", answers)
    with pytest.raises(EngineFault, match=r"version 4-.* is not held"):
        await score_order(engine, order)
    await engine.close()


async def test_no_seed_counts_as_missed_without_replay(engine: TorchEngine) -> None:
    answers = tuple(await written(engine, 2))
    order = ScoreAnswers(7, VERSION, DIGEST, "", "none", answers)
    assert [each.misses for each in (await score_order(engine, order)).found] == [None, None]
    await engine.close()


def test_the_torch_engine_can_score_and_the_fake_engine_cannot() -> None:
    assert isinstance(TorchEngine(), ScoringEngine)
    assert not isinstance(FakeEngine(), ScoringEngine)
