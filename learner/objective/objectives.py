"""Compute the objective of a train step: advantages, token shares, policy loss, distance to the
base.

| objective | advantage of answer i of a group | ratio | mean | arXiv |
| --- | --- | --- | --- | --- |
| grpo | (r_i - mean r) / (std r + STD_FLOOR) | of a token, clipped | token, as in DAPO | 2402.03300 |
| dr_grpo | r_i - mean r | of a token, clipped | constant | 2503.20783 |
| gspo | as grpo | geometric mean over an answer, clipped | sequence | 2507.18071 |
| cispo | as grpo | of a token, truncated, not clipped | token | 2506.13585 |
| rloo | r_i - mean of the others' r | of a token, clipped | token | 2402.14740 |

Not here: importance ratios and clips (`corrections`), and what a run has chosen (`config.Recipe`).

Suffixes of names: g = episodes of a group, n = answer tokens of a micro-batch, a = its answers.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echo2d.learner.config import AdvantageBaseline, Mean

LOG_RATIO_MAX = 20.0  # e^20: far beyond every bound, and finite in float32


def group_advantages(
    rewards_g: NDArray[np.float32], baseline: AdvantageBaseline, *, sample_std: bool = True
) -> NDArray[np.float32]:
    """Return A [g]: r_i - mean r; for `scaled` divided by the standard deviation of these rewards; for `leave_one_out`
    r_i - the mean of the others.

    GRPO (Shao et al. 2024, arXiv 2402.03300) scales. Dr. GRPO (Liu et al. 2025, arXiv 2503.20783)
    does not, because scaling gives most weight to groups that are nearly always right or nearly
    always wrong. sample_std: divide by g - 1 inside the deviation, as TRL and verl do, not by g.
    """
    others = len(rewards_g) - 1
    centred: NDArray[np.float32] = rewards_g - rewards_g.mean()
    if baseline == "centred" or not others:
        return centred
    if baseline == "leave_one_out":
        return np.asarray(centred * np.float32((others + 1) / others))
    deviation = rewards_g.std(ddof=1 if sample_std else 0)
    # A group of equal rewards keeps advantage 0.
    return np.asarray(centred / (deviation + np.float32(1e-4)))


@dataclass(frozen=True, slots=True)
class LossTotals:
    """The divisors of an optimizer step's loss: tokens in the loss, and answers with at least one
    such token. The branches of an episode count as one answer.
    """

    tokens: int
    answers: int


def token_shares(mean: Mean, totals: LossTotals, lengths_n: Tensor, *, constant: int) -> Tensor:
    """Return each token's factor in the loss [n]. The totals are those of the whole optimizer step,
    so that the losses of its micro-batches can be summed. lengths_n: how many tokens the answer o_i of each
    token has in the loss, with all its branches.

    token      1 / tokens                 DAPO (arXiv 2503.14476): answers count by their length
    sequence   1 / (answers * |o_i|)      GRPO, GSPO: every answer counts the same
    constant   1 / (answers * constant)   Dr. GRPO: independent of length; `constant` in tokens
    """
    if mean == "token":
        return torch.full_like(lengths_n, 1.0 / totals.tokens, dtype=torch.float32)
    if mean == "constant":
        return torch.full_like(lengths_n, 1.0 / (totals.answers * constant), dtype=torch.float32)
    return 1.0 / (totals.answers * lengths_n)


def answer_means(values_n: Tensor, answers_n: Tensor) -> Tensor:
    """Replace each token's value by the mean over its answer [n]. answers_n: index of each token's
    answer, ascending.
    """
    return torch.segment_reduce(values_n, "mean", lengths=torch.bincount(answers_n))[answers_n]


def policy_loss(
    logprobs_n: Tensor, weights_n: Tensor, advantages_n: Tensor, shares_n: Tensor
) -> Tensor:
    """-sum_t share_t w_t A_t log p_t, a scalar; only log p_t carries gradient.

    For a ratio rho = p/q the gradient of rho is rho times that of log p, so w = rho gives the
    policy gradient under importance sampling, and w = 0 where a clipped surrogate is flat
    (`corrections`).
    """
    return -(shares_n * weights_n * advantages_n * logprobs_n).sum()


@torch.no_grad()
def surrogate_loss(surrogate_n: Tensor, advantages_n: Tensor, shares_n: Tensor) -> Tensor:
    """-sum_t share_t x_t A_t, the clipped surrogate's value, which TRL and verl show as their loss. It has no
    gradient; `policy_loss` has.
    """
    return -(shares_n * surrogate_n * advantages_n).sum()


def distance_to_base(
    logprobs_n: Tensor, base_logprobs_n: Tensor, rollout_logprobs_n: Tensor | None = None
) -> Tensor:
    """k3 of each token [n], with gradient: b/p - log(b/p) - 1; its mean under samples of p is KL(p
    || base).

    GRPO's KL term (arXiv 2402.03300, eq. 4), after Schulman, "Approximating KL divergence" (2020).
    Never negative. rollout_logprobs_n: if given, each term is multiplied by p/q, with gradient, because the
    tokens are samples of the rollout's policy q. Without this factor the gradient is not that of KL(p || base)
    (DeepSeek-V3.2, arXiv 2512.02556). p/q is at most e^5.
    """
    log_ratio_n = (base_logprobs_n - logprobs_n).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
    distance_n = log_ratio_n.exp() - log_ratio_n - 1.0
    if rollout_logprobs_n is None:
        return distance_n
    # With a larger bound than e^5 = 148, one answer with wrong logprobs could decide the step.
    moved_n = (logprobs_n - rollout_logprobs_n).clamp(-LOG_RATIO_MAX, 5.0)
    return moved_n.exp() * distance_n
