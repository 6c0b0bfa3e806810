"""An auditor compares the experts that a worker tells with its own; honest rounding passes, chosen experts convict."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from echo2d.core.audit.baseline import limits_of
from echo2d.core.audit.case import Cases
from echo2d.core.base.ids import Digest, PeerId, Version, version_label
from echo2d.core.protocol.control_messages import AnswerToScore, ScoreAnswers
from echo2d.core.protocol.evidence import Evidence
from echo2d.core.protocol.experts import column_of
from echo2d.core.protocol.trajectory import pack_logprobs, pack_tokens
from echo2d.core.rules.audit import AuditRules
from echo2d.demo.tiny_model import TinyRecipe, make_tiny_model
from echo2d.engines.torch_engine import TorchEngine
from echo2d.runtime.audit.scoring import score_order
from tests.support.mixtures import MANY, mixture, written

VERSION, DIGEST, WORKER = Version(7), Digest(bytes(32)), PeerId("w" * 8)
PROMPT, TOKENS, HONEST, LIES = (3, 4, 5), 24, 80, 12
EXPERTS = MANY["num_local_experts"]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """A model, and what a worker in bfloat16 writes with it."""
    folder = tmp_path_factory.mktemp("audited")
    tokenizer = make_tiny_model(folder / "base", TinyRecipe(accuracy_stop=0.0, batch=8, layers=1))
    model = mixture(folder / "model", "qwen3 moe", tokenizer, **MANY)
    return model, asyncio.run(written(model, "bfloat16", PROMPT, HONEST, TOKENS))


def audited(model: Path, written: list[Any]) -> list[Evidence]:
    """What an auditor in float32 finds about these answers."""

    async def score() -> list[Evidence]:
        engine = TorchEngine(device="cpu", threads=1, dtype="float32")
        await engine.start()
        await engine.refit(model, version_label(VERSION, DIGEST))
        asked = tuple(
            AnswerToScore(
                pack_tokens(PROMPT), pack_tokens(tokens), pack_logprobs(logprobs), 0, None,
                columns=(column_of(experts, EXPERTS),),
            )
            for tokens, logprobs, experts in written
        )  # fmt: skip
        found = (
            await score_order(engine, ScoreAnswers(1, VERSION, DIGEST, "", "none", asked))
        ).found
        await engine.close()
        return list(found)

    return asyncio.run(score())


def random_experts(experts: Any) -> Any:
    rng = np.random.default_rng(0)
    drawn = rng.random((*experts.shape[:2], EXPERTS)).argsort(-1)
    return drawn[..., : experts.shape[2]].astype(experts.dtype)


def random_in_one_layer(experts: Any) -> Any:
    changed = experts.copy()
    changed[:, 1] = random_experts(experts)[:, 1]
    return changed


LIARS: dict[str, Callable[[Any], Any]] = {
    "random experts": random_experts,
    "random experts in one of four layers": random_in_one_layer,
    "the same experts always": lambda experts: np.broadcast_to(
        np.arange(experts.shape[2], dtype=experts.dtype), experts.shape
    ),
    "an expert twice": lambda experts: np.zeros_like(experts),
    "a number that no expert has": lambda experts: experts + 1 + EXPERTS - experts.max(),
    "experts of another token": lambda experts: np.roll(experts, 1, axis=0),
    "experts of another layer": lambda experts: np.roll(experts, 1, axis=1),
}


def test_honest_rounding_passes_and_chosen_experts_convict(answers: tuple[Path, list[Any]]) -> None:
    model, honest = answers
    found = audited(model, honest)
    learnt, others = found[: HONEST // 2], found[HONEST // 2 :]
    limits = limits_of(learnt)
    most = max(each.rerouted for each in found)
    print(f"rerouted by rounding: at most {most:.3f}, limit {limits.rerouted:.3f}")  # noqa: T201
    assert 0 < most < limits.rerouted < 0.5
    cases = Cases(AuditRules())
    assert [cases.judge(WORKER, each, limits) for each in others] == [((), "")] * len(others)
    for name, lie in LIARS.items():
        lies = [(tokens, logprobs, lie(experts)) for tokens, logprobs, experts in honest[:LIES]]
        cases, verdicts = Cases(AuditRules()), []
        for each in audited(model, lies):
            reasons, verdict = cases.judge(WORKER, each, limits)
            assert reasons == ("experts",), (name, each)
            verdicts.append(verdict)
        assert any("experts" in verdict for verdict in verdicts), name


def test_experts_change_nothing_else_in_the_evidence(answers: tuple[Path, list[Any]]) -> None:
    model, honest = answers
    lies = [(tokens, logprobs, random_experts(experts)) for tokens, logprobs, experts in honest[:2]]
    for found, lied in zip(audited(model, honest[:2]), audited(model, lies), strict=True):
        assert replace(lied, rerouted=found.rerouted) == found
