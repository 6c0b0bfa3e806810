"""Mixtures of experts in a real server: it takes the versions that the learner publishes, expert by expert."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from echo2d.core.protocol.columns import join_columns
from echo2d.core.protocol.experts import EXPERTS
from echo2d.engines.base import GenerateRequest
from echo2d.engines.server import sampling_loop
from echo2d.engines.sglang.engine import SglangEngine
from tests.support.engine_contract import Sample, generated
from tests.support.engine_harness import label, load_model, score
from tests.support.learner import config_in, learn, make_base
from tests.support.model_shapes import FOR_SGLANG, MOE, saved
from tests.support.scripted_coordinator import ScriptedCoordinator
from tests.support.sglang_servers import launch

STEPS, TOKENS = 2, 40
PROMPT = [3, 4, 5]
LOGPROB_ERROR_MAX = 1e-3
FAR = 100 * LOGPROB_ERROR_MAX  # two versions differ by more


@pytest.fixture(params=["qwen3 moe", "mixtral"])
def published(request: pytest.FixtureRequest, tmp_path: Path) -> list[Path]:
    """Versions 0, 1, ... of a learner of this family."""
    model = saved(
        tmp_path / "model", request.param, make_base(tmp_path / "tokenizer"), **FOR_SGLANG
    )
    coordinator = ScriptedCoordinator(tmp_path / "taken")
    learn(config_in(tmp_path, model, steps=STEPS, lr=0.02, warmup_steps=0), coordinator)
    return [coordinator.published(version) for version in range(STEPS + 1)]


async def test_a_server_serves_each_published_version(
    published: list[Path], tmp_path: Path
) -> None:
    engine = SglangEngine(launch(tmp_path / "engine"), slots=8)
    await engine.start()
    models = [load_model(version) for version in published]
    try:
        for version, model in enumerate(models):
            await engine.refit(published[version], label(version))
            assert engine.label == label(version)
            found = await generated(engine, GenerateRequest(f"r{version}", PROMPT, 2, TOKENS))
            for sample in found.samples:
                assert set(sample.labels) == {label(version)}
                assert len(sample.tokens) == TOKENS
                assert distance(sample, model) < LOGPROB_ERROR_MAX
                others = [distance(sample, other) for other in models if other is not model]
                assert min(others) > FAR
    finally:
        await engine.close()


def distance(sample: Sample, model: Any) -> float:
    truth = score(model, PROMPT, sample.tokens, 1.0)
    return max(abs(said - true) for said, true in zip(sample.logprobs, truth, strict=True))


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
async def test_a_server_tells_the_experts_that_drew_each_token(
    published: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: bool
) -> None:
    """The tokens come at the end of a request; a request that is cut tells the experts of its own tokens."""
    if cut:
        monkeypatch.setattr(sampling_loop, "WHOLE_S_MAX", 0.0)
    engine = SglangEngine(launch(tmp_path / "engine", "--enable-return-routed-experts"), slots=8)
    await engine.start()
    try:
        await engine.refit(published[0], label(0))
        request = GenerateRequest("r", PROMPT, 3, TOKENS, columns=[EXPERTS])
        found = await generated(engine, request)
    finally:
        await engine.close()
    model = load_model(published[0])
    for sample in found.samples:
        assert len(sample.tokens) == TOKENS
        parts = [each for each in sample.columns if each[0]]
        assert len(parts) > 1 if cut else len(parts) == 1
        (column,) = join_columns(parts)
        assert (np.sort(column.array) == np.sort(own_routing(model, sample.tokens))).mean() > 0.99


def own_routing(model: Any, tokens: list[int]) -> Any:
    """The experts that transformers' layers choose to draw each token [tokens, layers, chosen]."""
    with torch.no_grad():
        row = torch.tensor([[*PROMPT, *tokens]])
        layers = model(row, output_router_logits=True).router_logits
    chosen = [each.flatten(0, -2).topk(MOE["num_experts_per_tok"]).indices for each in layers]
    return torch.stack(chosen, 1)[len(PROMPT) - 1 : -1].numpy()
