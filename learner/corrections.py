"""Off-policy corrections: how much a token written by an older version still counts.

    p      the learner's probability of an answer token, given all before it, with the weights at hand
    q      the probability recorded by the engine that wrote it (the *rollout's*, never recomputed)
    m      its probability under the *proximal* policy, from which the step may go only so far
    rho    p / q, the importance ratio; 1 where nothing changed in between
    A      the advantage of the token's answer

A token's weight is a constant in the gradient of `-w A log p`. `weights` puts it together from these parts:

| part | weight | source |
| --- | --- | --- |
| truncated importance sampling | min(x, cap) | rho-bar of IMPALA, arXiv 1802.01561 |
| IcePop, masked importance sampling | x where low <= x <= high, else 0 | arXiv 2510.18855 |
| sequence mask | 0 for an answer whose geometric mean of x leaves low..high | `rollout_rs` of verl, MIS of slime |
| clip, clip-higher | 0 where x is above 1 + high (A > 0) or below 1 - low (A < 0) | arXiv 1707.06347, 2503.14476 |
| two-sided clip | 0 also where A < 0 and x > max | dual clip, arXiv 1912.09729; INTELLECT-2, arXiv 2505.07291 |
| decoupled PPO | importance m / q, clip on p / m | arXiv 2110.00641; asynchronous: AReaL, arXiv 2505.24298 |

Suffixes of names: n = answer tokens of a micro-batch.
"""

import torch
from torch import Tensor

from learner.objectives import LOG_RATIO_MAX, answer_means


def log_ratio(logprobs_n: Tensor, rollout_logprobs_n: Tensor) -> Tensor:
    """log rho [n], without gradient; finite whatever a rollout says."""
    return (logprobs_n.detach() - rollout_logprobs_n).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)


def loglinear_share(staleness_n: Tensor) -> Tensor:
    """alpha [n] of log m = (1 - alpha) log q + alpha log p: the proximal logprobs without a forward pass.

    alpha = (v_m - v_q) / (v_p - v_q) with the versions of the token (v_q, from its span), of the weights that train
    step n starts from (v_m = n-1), and of those that it makes (v_p = n): s / (s + 1) for staleness s. So fresh tokens
    are judged by the clip alone, old ones mostly by their importance. (A-3PO, arXiv 2512.06547; AReaL has it)
    """
    return staleness_n / (staleness_n + 1.0)


def clip_keeps(
    ratio_n: Tensor, advantages_n: Tensor, eps_low: float, eps_high: float, ratio_max: float
) -> Tensor:
    """bool [n]: false where the clipped surrogate is flat. ratio_max: of the two-sided clip, 0 for none."""
    above = (advantages_n > 0) & (ratio_n > 1.0 + eps_high)
    below = (advantages_n < 0) & (ratio_n < 1.0 - eps_low)
    beyond = (advantages_n < 0) & (ratio_n > (ratio_max or float("inf")))
    return ~(above | below | beyond)


def truncate(ratio_n: Tensor, cap: float) -> Tensor:
    """min(x, cap) [n]: without a cap a few tokens that have become much more likely would rule the step."""
    return torch.clamp(ratio_n, max=cap)


def mask_tokens(ratio_n: Tensor, low: float, high: float) -> Tensor:
    """x where low <= x <= high, else 0 [n]: what left the range tells of another policy, or of another engine."""
    return ratio_n * ((ratio_n >= low) & (ratio_n <= high))


def mask_answers(log_ratio_n: Tensor, answers_n: Tensor, low: float, high: float) -> Tensor:
    """bool [n]: whether the geometric mean of the token's answer lies in low..high."""
    means_n = answer_means(log_ratio_n, answers_n).exp()
    return (means_n >= low) & (means_n <= high)
