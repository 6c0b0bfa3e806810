"""Scores answers that somebody else wrote: one prefill, no generation.

For each token of an answer it tells how likely the token was, how surprised a sampler is on average
there, and which part of [0, 1) the token holds in the cumulated distribution from which `sampling`
draws. Pure tensor code around one forward pass of a policy.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echo2d.engines.torch_engine.policy import InferencePolicy
from echo2d.engines.torch_engine.sampling import chances_of

# Logits of so many positions are turned into distributions at once: 160 MB at 150k tokens in
# float64, of which a few are alive.
POSITIONS_MAX = 128


@dataclass(frozen=True, slots=True, eq=False)
class ScoredAnswer:
    """What a policy says about the tokens of an answer; every array is float64 [n].

    logprobs: of the full distribution at this temperature, as engines report them. surprises: minus
    the logprob of the distribution that is drawn from (top_p applied). entropies, variances: mean
    and variance of the surprise there. lows, highs: the token is drawn for numbers u with
    low <= u < high.
    """

    logprobs: NDArray[np.float64]
    surprises: NDArray[np.float64]
    entropies: NDArray[np.float64]
    variances: NDArray[np.float64]
    lows: NDArray[np.float64]
    highs: NDArray[np.float64]


def score(
    policy: InferencePolicy,
    prompt: Sequence[int],
    answer: Sequence[int],
    *,
    temperature: float,
    top_p: float,
) -> ScoredAnswer:
    """Score an answer to a prompt; each has at least one token.

    temperature: above 0, because a greedy answer has no distribution.
    """
    assert len(prompt) > 0 < len(answer)
    assert temperature > 0
    tokens = torch.tensor([[*prompt, *answer]], dtype=torch.int64, device=policy.device)
    with torch.inference_mode():
        # The logits at a position are those of the token behind it.
        logits = policy.logits(tokens, len(answer) + 1)[0, :-1]
        columns = [
            _facts(part, written, temperature, top_p)
            for part, written in zip(
                torch.split(logits, POSITIONS_MAX),
                torch.split(tokens[0, len(prompt) :], POSITIONS_MAX),
                strict=True,
            )
        ]
        joined = torch.cat(columns, dim=1).cpu().numpy()
    return ScoredAnswer(*joined)


def _facts(logits: Tensor, tokens: Tensor, temperature: float, top_p: float) -> Tensor:
    """The arrays of a ScoredAnswer, stacked [6, rows], for logits [rows, vocab]."""
    rows = logits.shape[0]
    scale = torch.full((rows,), temperature, dtype=torch.float64, device=logits.device)
    nucleus = torch.full_like(scale, top_p) if top_p < 1 else None
    logprobs, weights = chances_of(logits, scale, nucleus)
    cdf = weights.cumsum(dim=-1)
    total = cdf[:, -1:]
    drawn = (weights / total).clamp_min(torch.finfo(torch.float64).tiny).log()
    shares = weights / total
    entropies = -(shares * drawn).sum(dim=-1)
    variances = (shares * drawn.square()).sum(dim=-1) - entropies.square()
    at = tokens[:, None]
    highs = (cdf / total).gather(1, at)
    lows = highs - shares.gather(1, at)
    picked = [logprobs.to(torch.float64).gather(1, at), -drawn.gather(1, at)]
    return torch.stack(
        [
            *(each.squeeze(1) for each in picked),
            entropies,
            variances.clamp_min(0.0),
            lows.squeeze(1),
            highs.squeeze(1),
        ]
    )
