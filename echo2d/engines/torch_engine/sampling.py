"""Draws tokens from logits and computes their exact logprobs. Pure tensor code."""

from collections.abc import Sequence

import torch
from torch import Tensor

from echo2d.core.protocol.sampling import Sampling


def draw(
    logits: Tensor, samplings: Sequence[Sampling], uniforms: Sequence[float]
) -> tuple[list[int], list[float]]:
    """Return a token and its logprob for each row of `logits` [rows, vocab].

    samplings, uniforms: one per row. A uniform, in [0, 1), decides the row's token, so a draw
    depends on its row alone. The logprob is log_softmax(logits / temperature) over the full
    vocabulary, in float32. At temperature 0 the likeliest token is taken, with its logprob at
    temperature 1. Tokens that a sampling cuts off are never drawn, but the logprobs still count them.
    """
    logprobs, weights = chances_of(logits, samplings)
    uniform = torch.tensor(uniforms, dtype=torch.float64, device=logits.device)
    tokens = _invert_cdf(weights, uniform)
    if any(each.temperature == 0 for each in samplings):
        greedy = torch.tensor([each.temperature == 0 for each in samplings], device=logits.device)
        tokens = torch.where(greedy, logits.argmax(dim=-1), tokens)
    chosen = logprobs.gather(1, tokens[:, None]).squeeze(1)
    # Tokens and logprobs are stacked, so that one copy brings both to the host; float64 holds every token id exactly.
    host_tokens, host_logprobs = torch.stack(
        [tokens.to(torch.float64), chosen.to(torch.float64)]
    ).tolist()
    return [int(token) for token in host_tokens], host_logprobs


def chances_of(logits: Tensor, samplings: Sequence[Sampling]) -> tuple[Tensor, Tensor]:
    """The distribution of each row of `logits` [rows, vocab]; temperature 0 counts as 1 here.

    Returns logprobs, float32 [rows, vocab], of the whole distribution at its temperature, and
    float64 weights [rows, vocab] to draw from: 0 for tokens cut off, and not normalized.
    """
    temperatures = [each.temperature or 1.0 for each in samplings]
    scale = torch.tensor(temperatures, dtype=torch.float32, device=logits.device)[:, None]
    logprobs = torch.log_softmax(logits.to(torch.float32) / scale, dim=-1)
    weights = logprobs.to(torch.float64).exp()
    cuts = any(each.cuts for each in samplings)
    return logprobs, _cut(weights, samplings) if cuts else weights


def _invert_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    """Return, per row, the first token whose cumulated weight exceeds uniform * total.

    Such a token never has weight 0. weights [rows, vocab] are float64, because a sum in float32
    would lose rare tokens.
    """
    cdf = weights.cumsum(dim=-1)
    found = torch.searchsorted(cdf, uniform[:, None] * cdf[:, -1:], right=True).squeeze(1)
    return found.clamp(max=weights.shape[1] - 1)


def _cut(weights: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Set to 0 the weights [rows, vocab] of the tokens that the samplings cut off.

    A token as likely as the least likely kept one is kept too.
    """
    vocab = weights.shape[1]
    table = [(each.top_p, each.top_k or vocab, each.min_p) for each in samplings]
    top_p, top_k, min_p = torch.tensor(table, dtype=torch.float64, device=weights.device).T[
        :, :, None
    ]
    ordered = weights.sort(dim=-1, descending=True).values
    # With top_p 1 every token is kept, though rounding may let the sum reach 1 before the last one.
    nucleus = (ordered.cumsum(dim=-1) - ordered < top_p) | (top_p == 1)
    ranks = torch.arange(vocab, device=weights.device)
    inside = nucleus & (ranks < top_k) & (ordered >= min_p * ordered[:, :1])
    # The smallest weight inside becomes a threshold, so that the sorting need not be undone.
    least = torch.where(inside, ordered, torch.inf).amin(dim=-1, keepdim=True)
    return torch.where(weights >= least, weights, 0.0)
