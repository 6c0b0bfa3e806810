"""Writes answers as SGLang draws them with --enable-deterministic-inference.

It replaces a GPU with SGLang in measurements of the replay: the model runs in torch, and the draw follows
the formula of `torch_engine/gumbel.py`. The noise comes from that module, which is tested against SGLang;
the choice of the token is a second implementation.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from echo2d.core.protocol.sampling import Sampling
from echo2d.core.protocol.seeds import SGLANG_SEED_MASK
from echo2d.engines.torch_engine.batch import DecodeBatch
from echo2d.engines.torch_engine.gumbel import gumbel_noise
from echo2d.engines.torch_engine.policy import InferencePolicy

WrittenTokens = tuple[list[int], list[float]]  # tokens and their logprobs


def write_gumbel(
    policy: InferencePolicy,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    *,
    tokens: int,
    ends: Collection[int],
    sampling: Sampling,
    by_rank: bool = False,
) -> list[WrittenTokens]:
    """Answer all prompts in one batch, each with its seed, with at most `tokens` tokens each.

    by_rank: draw ranks, as SGLang does while some request of its batch is greedy or cuts its
    distribution; a sampling that cuts implies it.
    """
    answers: list[WrittenTokens] = [([], []) for _ in prompts]
    running = list(range(len(prompts)))
    with torch.inference_mode():
        batch = DecodeBatch(policy)
        batch.add(prompts, [1] * len(prompts))
        while True:
            logprobs = torch.log_softmax(
                batch.logits.to(torch.float32) / sampling.temperature, dim=-1
            )
            for row, index in enumerate(running):
                position = len(prompts[index]) + len(answers[index][0]) - 1
                ranked = by_rank or sampling.cuts
                token = _drawn(logprobs[row], seeds[index], position, sampling, by_rank=ranked)
                answers[index][0].append(token)
                answers[index][1].append(float(logprobs[row, token]))
            kept = [
                row
                for row, index in enumerate(running)
                if len(answers[index][0]) < tokens and answers[index][0][-1] not in ends
            ]
            if not kept:
                return answers
            running = [running[row] for row in kept]
            batch.keep(kept)
            batch.step([answers[index][0][-1] for index in running])


def _drawn(logprobs: Tensor, seed: int, position: int, sampling: Sampling, *, by_rank: bool) -> int:
    """The token that SGLang draws from logprobs [vocab]."""
    at = torch.tensor([position], device=logprobs.device)
    noise = gumbel_noise(seed & SGLANG_SEED_MASK, at, len(logprobs))[0]
    if not by_rank:
        return int((logprobs + noise).argmax())
    chances, order = logprobs.exp().sort(descending=True)
    least = sampling.min_p * chances[0]
    chances[chances.cumsum(dim=0) - chances > sampling.top_p] = 0.0
    chances[sampling.top_k or len(chances) :] = 0.0
    chances[chances < least] = 0.0
    return int(order[(chances.to(torch.float64).log() + noise).argmax()])
