"""From logits to drawn tokens and the exact logprobs of the distribution they were drawn from. Pure tensor code."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Chances:
    """How each row of a batch is drawn. All lists have one entry per row.

    uniforms: one number in [0, 1) per row decides its token, so a draw depends on the row alone and not on which other
    rows share its batch.
    """

    temperatures: list[float]
    top_ps: list[float]
    uniforms: list[float]


def draw(logits: Tensor, chances: Chances) -> tuple[list[int], list[float]]:
    """Tokens and logprobs, one per row of `logits` [rows, vocab]; one copy to the host.

    logprob: log_softmax of logits / temperature over the full vocabulary in float32; temperature 0 takes the likeliest
    token and reports its logprob at temperature 1. top_p limits the draw, never the logprob.
    """
    table = [chances.temperatures, chances.top_ps, chances.uniforms]
    temperature, top_p, uniform = torch.tensor(
        table, dtype=torch.float64, device=logits.device
    ).unbind(0)
    greedy = temperature == 0
    scale = torch.where(greedy, 1.0, temperature).to(torch.float32)
    logprobs = torch.log_softmax(logits.to(torch.float32) / scale[:, None], dim=-1)
    weights = logprobs.to(torch.float64).exp()
    if min(chances.top_ps) < 1:
        weights = _nucleus(weights, top_p)
    tokens = torch.where(greedy, logits.argmax(dim=-1), _invert_cdf(weights, uniform))
    chosen = logprobs.gather(1, tokens[:, None]).squeeze(1)
    host_tokens, host_logprobs = torch.stack(
        [tokens.to(torch.float64), chosen.to(torch.float64)]
    ).tolist()
    return [int(token) for token in host_tokens], host_logprobs


def _invert_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    """The first token whose cumulated weight exceeds uniform * total: never one of weight 0 (float64: rare tokens)."""
    cdf = weights.cumsum(dim=-1)
    found = torch.searchsorted(cdf, uniform[:, None] * cdf[:, -1:], right=True).squeeze(1)
    return found.clamp(max=weights.shape[1] - 1)


def _nucleus(weights: Tensor, top_p: Tensor) -> Tensor:
    """Zero for all but the likeliest tokens that together reach top_p (equals of the last one stay); [rows, vocab]."""
    ordered = weights.sort(dim=-1, descending=True).values
    inside = ordered.cumsum(dim=-1) - ordered < top_p[:, None]
    least = torch.where(inside, ordered, torch.inf).amin(dim=-1, keepdim=True)
    return torch.where((weights >= least) | (top_p[:, None] == 1), weights, 0.0)
