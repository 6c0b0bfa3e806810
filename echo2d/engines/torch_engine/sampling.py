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
    temperature 1. What a sampling cuts off is never drawn, but its share stays in the logprobs.
    """
    logprobs, weights = chances_of(logits, samplings)
    uniform = torch.tensor(uniforms, dtype=torch.float64, device=logits.device)
    tokens = _invert_cdf(weights, uniform)
    if any(each.temperature == 0 for each in samplings):
        greedy = torch.tensor([each.temperature == 0 for each in samplings], device=logits.device)
        tokens = torch.where(greedy, logits.argmax(dim=-1), tokens)
    chosen = logprobs.gather(1, tokens[:, None]).squeeze(1)
    # Stacked, both cross to the host in one copy; float64 holds every token id exactly.
    host_tokens, host_logprobs = torch.stack(
        [tokens.to(torch.float64), chosen.to(torch.float64)]
    ).tolist()
    return [int(token) for token in host_tokens], host_logprobs


def chances_of(logits: Tensor, samplings: Sequence[Sampling]) -> tuple[Tensor, Tensor]:
    """The distribution of each row of `logits` [rows, vocab]; temperature 0 counts as 1 here.

    Returns logprobs, float32 [rows, vocab], of the whole distribution at its temperature; and
    float64 weights [rows, vocab] to draw from, 0 where the sampling cuts, which need not sum to 1.
    """
    temperatures = [each.temperature or 1.0 for each in samplings]
    scale = torch.tensor(temperatures, dtype=torch.float32, device=logits.device)[:, None]
    logprobs = torch.log_softmax(logits.to(torch.float32) / scale, dim=-1)
    weights = logprobs.to(torch.float64).exp()
    cuts = any(each.cuts for each in samplings)
    return logprobs, _cut(weights, samplings) if cuts else weights


def _invert_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    """Return, per row, the first token whose cumulated weight exceeds uniform * total.

    Such a token never has weight 0. weights [rows, vocab] are float64, because in float32 the sum
    would swallow rare tokens.
    """
    cdf = weights.cumsum(dim=-1)
    found = torch.searchsorted(cdf, uniform[:, None] * cdf[:, -1:], right=True).squeeze(1)
    return found.clamp(max=weights.shape[1] - 1)


def _cut(weights: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Set all weights [rows, vocab] to 0 but those that the samplings keep.

    Tokens as likely as the least likely one that is kept stay too.
    """
    vocab = weights.shape[1]
    table = [(each.top_p, each.top_k or vocab, each.min_p) for each in samplings]
    top_p, top_k, min_p = torch.tensor(table, dtype=torch.float64, device=weights.device).T[
        :, :, None
    ]
    ordered = weights.sort(dim=-1, descending=True).values
    # Rounding may let the sum of all reach 1 before the last token.
    nucleus = (ordered.cumsum(dim=-1) - ordered < top_p) | (top_p == 1)
    ranks = torch.arange(vocab, device=weights.device)
    inside = nucleus & (ranks < top_k) & (ordered >= min_p * ordered[:, :1])
    # The smallest weight inside is a threshold, so the sorted order need not be undone.
    least = torch.where(inside, ordered, torch.inf).amin(dim=-1, keepdim=True)
    return torch.where(weights >= least, weights, 0.0)
