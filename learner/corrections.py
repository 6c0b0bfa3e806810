"""Off-policy corrections: how much a token written by an older version still counts.

    p_t     the learner's probability of answer token t, given all before it, with the weights of this train step
    q_t     the probability recorded by the engine that wrote it (the *rollout's*, never recomputed)
    rho_t   p_t / q_t, the importance ratio; 1 where nothing changed in between
    A_t     the advantage of the token's trajectory

A token's weight is a constant in the gradient:   w_t = min(rho_t, cap) * [the clip keeps t]

- min(rho, cap) is truncated importance sampling (Ionides 2008; the rho-bar of IMPALA, Espeholt 2018): without a cap a
  few tokens that have become much more likely would rule the step.
- The clip (PPO, Schulman 2017) drops a token that has already moved past 1 + eps_high or below 1 - eps_low *in the
  direction in which its advantage pushes*. `-w A log p` has the gradient of PPO's clipped surrogate
  min(rho A, clip(rho) A) wherever rho <= cap.

Suffix of names: n = answer tokens of a micro-batch.
"""

import torch
from torch import Tensor

LOG_RATIO_MAX = 20.0  # e^20: far beyond every cap, and finite in float32


def importance_ratio(logprobs_n: Tensor, rollout_logprobs_n: Tensor) -> Tensor:
    """rho [n], without gradient."""
    return (logprobs_n.detach() - rollout_logprobs_n).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp()


def clip_keeps(ratio_n: Tensor, advantages_n: Tensor, eps_low: float, eps_high: float) -> Tensor:
    """bool [n]: false where PPO's clipped surrogate is flat."""
    above = (advantages_n > 0) & (ratio_n > 1.0 + eps_high)
    below = (advantages_n < 0) & (ratio_n < 1.0 - eps_low)
    return ~(above | below)


def truncate(ratio_n: Tensor, cap: float) -> Tensor:
    """min(rho, cap) [n]."""
    return torch.clamp(ratio_n, max=cap)
