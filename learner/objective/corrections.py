"""Compute off-policy corrections: how much a token written by an older version still counts.

    p      the learner's probability of an answer token, given all tokens before it, with the present weights
    q      the probability recorded by the engine that wrote it (the *rollout's*, never recomputed)
    m      its probability under the *proximal* policy, from which the step may move only a little
    rho    p / q, the importance ratio; 1 if nothing changed in between
    x      the ratio that each part looks at: rho, or with decoupled PPO the ratios in the last row
    A      the advantage of the token's answer

A token's weight is a constant in the gradient of `-w A log p`. `token_weights` combines it from
these parts:

| part | weight | source (numbers: arXiv) |
| --- | --- | --- |
| truncated importance sampling | min(x, cap) | rho-bar of IMPALA, 1802.01561 |
| adaptive clip | min(x, cap), and the upper end of the clip times x / cap, 1 to cap | after QuRL, 2602.13953 |
| the same for an answer | min(product of the answer's x, cap) | verl `rollout_is = "sequence"` |
| IcePop, masked importance sampling | x where low <= x <= high, else 0 | 2510.18855 |
| sequence mask | 0 if the geometric mean of the answer's x is outside low..high | verl `rollout_rs`, slime MIS |
| clip, clip-higher | 0 if x > 1 + high (A > 0) or x < 1 - low (A < 0) | 1707.06347, 2503.14476 |
| two-sided clip | 0 also if A < 0 and x > max | dual clip 1912.09729; INTELLECT-2 2505.07291 |
| decoupled PPO | x is p / m in the two clips, m / q in the other parts | 2110.00641; asynchronous: AReaL 2505.24298 |

Suffixes of names: n = answer tokens of a micro-batch.
"""

import torch
from torch import Tensor

from echo2d.learner.objective.objectives import LOG_RATIO_MAX, answer_means


def log_ratio(logprobs_n: Tensor, rollout_logprobs_n: Tensor) -> Tensor:
    """Return log rho [n] without gradient, clamped so that it is finite for any logprobs of a
    rollout.
    """
    return (logprobs_n.detach() - rollout_logprobs_n).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)


def loglinear_share(staleness_n: Tensor) -> Tensor:
    """alpha [n] of log m = (1 - alpha) log q + alpha log p: the proximal logprobs without a forward
    pass.

    alpha = (v_m - v_q) / (v_p - v_q) with the versions of the token (v_q, from its span), of the
    weights that train step n starts from (v_m = n-1), and of those that it makes (v_p = n). This is
    s / (s + 1) for staleness s. So for fresh tokens only the clip matters, for old ones mostly their
    importance. (A-3PO, arXiv 2512.06547. AReaL takes the version that a step makes to be the one that it
    starts from, so its share is (s - 1) / s from s = 1 on.)
    """
    return staleness_n / (staleness_n + 1.0)


def widened(highest: float, importance_n: Tensor, cap: float) -> Tensor:
    """Return the upper end of the clip [n]: for a token whose importance x is truncated, x / cap times as high, so
    that the truncated weight times this end is what it is without truncation.

    At most `cap` times as high: x has the rollout's logprob in it, which may be wrong. QuRL (arXiv 2602.13953) adapts
    the range to the ratio of the full-precision to the quantized policy. This form of it is ours.
    """
    return highest * (importance_n / cap).clamp(1.0, cap)


def clip_keeps(
    ratio_n: Tensor, advantages_n: Tensor, eps_low: float, high: float | Tensor, ratio_max: float
) -> Tensor:
    """Return bool [n]: False where the clipped surrogate is flat. high: the upper end of the clip, 1 + epsilon.
    ratio_max: of the two-sided clip; 0 turns it off.
    """
    above = (advantages_n > 0) & (ratio_n > high)
    below = (advantages_n < 0) & (ratio_n < 1.0 - eps_low)
    beyond = (advantages_n < 0) & (ratio_n > (ratio_max or float("inf")))
    return ~(above | below | beyond)


def clip_value(
    ratio_n: Tensor, advantages_n: Tensor, eps_low: float, high: float | Tensor, ratio_max: float
) -> Tensor:
    """Return the ratio [n] that counts in the clipped surrogate: where this is flat, the ratio at its corner."""
    highest = ratio_max or float("inf")
    return torch.where(
        advantages_n > 0, ratio_n.clamp(max=high), ratio_n.clamp(1.0 - eps_low, highest)
    )


def mask_tokens(ratio_n: Tensor, low: float, high: float) -> Tensor:
    """Return x where low <= x <= high, else 0 [n]. Beyond the range the policy, or the engine,
    differs too much.
    """
    return ratio_n * ((ratio_n >= low) & (ratio_n <= high))


def mask_answers(log_ratio_n: Tensor, answers_n: Tensor, low: float, high: float) -> Tensor:
    """Return bool [n]: whether the geometric mean of the ratios of the token's answer is in
    low..high.
    """
    means_n = answer_means(log_ratio_n, answers_n).exp()
    return (means_n >= low) & (means_n <= high)
