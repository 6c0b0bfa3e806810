"""Draws tokens from logits and computes their exact logprobs. Pure tensor code."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Chances:
    """How to draw each row of a batch. All lists have one entry per row.

    uniforms: a number in [0, 1) that decides the row's token. So a draw depends on its row alone,
    not on the other rows of the batch.
    """

    temperatures: list[float]
    top_ps: list[float]
    uniforms: list[float]


def draw(logits: Tensor, chances: Chances) -> tuple[list[int], list[float]]:
    """Return a token and its logprob for each row of `logits` [rows, vocab].

    The logprob is log_softmax(logits / temperature) over the full vocabulary, in float32. At
    temperature 0 the likeliest token is taken, with its logprob at temperature 1. top_p limits the
    draw, never the logprob.
    """
    table = [chances.temperatures, chances.top_ps, chances.uniforms]
    temperature, top_p, uniform = torch.tensor(
        table, dtype=torch.float64, device=logits.device
    ).unbind(0)
    greedy = temperature == 0
    cut = top_p if min(chances.top_ps) < 1 else None
    logprobs, weights = chances_of(logits, torch.where(greedy, 1.0, temperature), cut)
    tokens = torch.where(greedy, logits.argmax(dim=-1), _invert_cdf(weights, uniform))
    chosen = logprobs.gather(1, tokens[:, None]).squeeze(1)
    # Stacked, both cross to the host in one copy; float64 holds every token id exactly.
    host_tokens, host_logprobs = torch.stack(
        [tokens.to(torch.float64), chosen.to(torch.float64)]
    ).tolist()
    return [int(token) for token in host_tokens], host_logprobs


def chances_of(logits: Tensor, temperature: Tensor, top_p: Tensor | None) -> tuple[Tensor, Tensor]:
    """The distribution of each row of `logits` [rows, vocab], at temperatures > 0.

    temperature, top_p: float64 [rows]; top_p None: it is 1 in all rows. Returns logprobs, float32
    [rows, vocab], of the whole distribution at this temperature; and float64 weights [rows, vocab]
    to draw from, 0 beyond top_p, which need not sum to 1.
    """
    scale = temperature.to(torch.float32)[:, None]
    logprobs = torch.log_softmax(logits.to(torch.float32) / scale, dim=-1)
    weights = logprobs.to(torch.float64).exp()
    return logprobs, weights if top_p is None else _nucleus(weights, top_p)


def _invert_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    """Return, per row, the first token whose cumulated weight exceeds uniform * total.

    Such a token never has weight 0. weights [rows, vocab] are float64, because in float32 the sum
    would swallow rare tokens.
    """
    cdf = weights.cumsum(dim=-1)
    found = torch.searchsorted(cdf, uniform[:, None] * cdf[:, -1:], right=True).squeeze(1)
    return found.clamp(max=weights.shape[1] - 1)


def _nucleus(weights: Tensor, top_p: Tensor) -> Tensor:
    """Set all weights [rows, vocab] to 0 but those of the likeliest tokens that reach top_p.

    Tokens as likely as the last of them stay too.
    """
    ordered = weights.sort(dim=-1, descending=True).values
    inside = ordered.cumsum(dim=-1) - ordered < top_p[:, None]
    # The smallest weight inside is a threshold, so the sorted order need not be undone.
    least = torch.where(inside, ordered, torch.inf).amin(dim=-1, keepdim=True)
    return torch.where((weights >= least) | (top_p[:, None] == 1), weights, 0.0)
