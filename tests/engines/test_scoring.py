"""One prefill tells whether an answer was drawn as it ought to have been."""

from pathlib import Path

import numpy as np
import pytest
import torch

from echo2d.core.audit.evidence import Evidence, evidence, outside
from echo2d.core.protocol.seeds import uniforms
from echo2d.engines.base import GenerateRequest
from echo2d.engines.torch_engine.engine import TorchEngine
from echo2d.engines.torch_engine.policy import InferencePolicy, build, prepare
from echo2d.engines.torch_engine.scoring import ScoredAnswer, score
from tests.support.engine_harness import VOCAB_SIZE, save_random_model, tiny_config

PROMPT = [3, 4, 5]
SEEDS = tuple(range(40, 56))
TOKENS = 30


def saved(folder: Path, version: int = 0) -> Path:
    save_random_model(folder, tiny_config(), rng_seed=version)
    return folder


def policy_of(snapshot: Path) -> InferencePolicy:
    with torch.inference_mode():
        return build(prepare(snapshot, None, torch.float32), torch.float32, torch.device("cpu"))


async def written(
    snapshot: Path, *, temperature: float = 1.0, top_p: float = 1.0
) -> list[tuple[list[int], list[float]]]:
    """Tokens and logprobs of one answer for each of SEEDS."""
    engine = TorchEngine(threads=1)
    await engine.start()
    await engine.refit(snapshot, "0-a")
    request = GenerateRequest("r", PROMPT, len(SEEDS), TOKENS, temperature, top_p, rng_seeds=SEEDS)
    found: list[tuple[list[int], list[float]]] = [([], []) for _ in SEEDS]
    async for delta in engine.generate(request):
        found[delta.sample][0].extend(delta.tokens)
        found[delta.sample][1].extend(delta.logprobs)
    await engine.close()
    return found


def weighed(scored: ScoredAnswer, claimed: list[float], seed: int) -> Evidence:
    numbers = uniforms(seed, np.arange(len(claimed)))
    return evidence(
        scored.logprobs,
        np.array(claimed),
        surprises=scored.surprises,
        entropies=scored.entropies,
        variances=scored.variances,
        outside=outside(numbers, scored.lows, scored.highs),
    )


@pytest.mark.may_block
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (1.3, 0.8)])
async def test_an_honest_answer_lies_where_its_seed_points(
    tmp_path: Path, temperature: float, top_p: float
) -> None:
    answers = await written(saved(tmp_path), temperature=temperature, top_p=top_p)
    policy, zs = policy_of(tmp_path), []
    for seed, (tokens, logprobs) in zip(SEEDS, answers, strict=True):
        scored = score(policy, PROMPT, tokens, temperature=temperature, top_p=top_p)
        found = weighed(scored, logprobs, seed)
        assert found.k < 1e-4
        assert found.misses == 0
        assert (scored.highs > scored.lows).all()
        zs.append(found.z)
    assert abs(np.mean(zs)) < 1.0


@pytest.mark.may_block
async def test_the_answer_to_another_seed_does_not(tmp_path: Path) -> None:
    answers = await written(saved(tmp_path))
    policy = policy_of(tmp_path)
    for seed, (tokens, logprobs) in zip(SEEDS, answers, strict=True):
        found = weighed(
            score(policy, PROMPT, tokens, temperature=1.0, top_p=1.0), logprobs, seed + 1
        )
        assert (found.misses or 0) > TOKENS // 3


@pytest.mark.may_block
async def test_another_versions_answer_has_other_logprobs(tmp_path: Path) -> None:
    answers = await written(saved(tmp_path / "0"))
    policy = policy_of(saved(tmp_path / "1", 1))
    for seed, (tokens, logprobs) in zip(SEEDS, answers, strict=True):
        found = weighed(score(policy, PROMPT, tokens, temperature=1.0, top_p=1.0), logprobs, seed)
        assert found.k > 0.01


def test_likely_tokens_surprise_too_little_and_made_up_ones_too_much(tmp_path: Path) -> None:
    """True logprobs do not help: the tokens were chosen, and not drawn."""
    policy = policy_of(saved(tmp_path))
    greedy, rare = list(PROMPT), list(PROMPT)
    with torch.inference_mode():
        for _ in range(TOKENS):
            greedy.append(int(policy.logits(torch.tensor([greedy]), 1)[0, -1].argmax()))
            rare.append(int(policy.logits(torch.tensor([rare]), 1)[0, -1].argmin()))
    for tokens, sign in ((greedy, -1), (rare, 1)):
        answer = tokens[len(PROMPT) :]
        scored = score(policy, PROMPT, answer, temperature=1.0, top_p=1.0)
        found = weighed(scored, scored.logprobs.tolist(), 7)
        assert found.k == 0
        assert sign * found.z > 1
        assert (found.misses or 0) > TOKENS // 3


def test_the_parts_of_all_tokens_fill_the_line(tmp_path: Path) -> None:
    policy = policy_of(saved(tmp_path))
    each = [
        score(policy, PROMPT, [token], temperature=1.0, top_p=0.9) for token in range(VOCAB_SIZE)
    ]
    edges = [0.0, *(float(one.highs[0]) for one in each)]
    assert [float(one.lows[0]) for one in each] == pytest.approx(edges[:-1])
    assert edges[-1] == pytest.approx(1.0)
    shares = np.array([float(one.highs[0] - one.lows[0]) for one in each])
    inside = shares > 0
    entropy = -float((shares[inside] * np.log(shares[inside])).sum())
    assert float(each[0].entropies[0]) == pytest.approx(entropy)
