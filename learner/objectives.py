"""What a train step maximises: advantages, how tokens and answers are averaged, the loss, and the distance to the base.

| objective | advantage of answer i of a group | ratio that is clipped | mean | source |
| --- | --- | --- | --- | --- |
| grpo | (r_i - mean r) / (std r + STD_FLOOR) | of a token | token, as in DAPO; its paper: sequence | arXiv 2402.03300 |
| dr_grpo | r_i - mean r | of a token | constant | arXiv 2503.20783 |
| gspo | as grpo | of an answer, its tokens' geometric mean | sequence | arXiv 2507.18071 |

Not here: the ratios and what bounds them (`corrections`), what a run chose of all this (`config.Recipe`).

Suffixes of names: g = trajectories of a group, n = answer tokens of a micro-batch, a = its answers.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.config import Mean

STD_FLOOR = 1e-4  # keeps a group of equal rewards at advantage 0
LOG_RATIO_MAX = 20.0  # e^20: far beyond every bound, and finite in float32


def group_advantages(rewards_g: NDArray[np.float32], *, scaled: bool = True) -> NDArray[np.float32]:
    """A [g]: r_i - mean(r), in units of the standard deviation of exactly these rewards if `scaled`.

    GRPO (Shao et al. 2024, arXiv 2402.03300) scales. Dr. GRPO (Liu et al. 2025, arXiv 2503.20783) does not: it makes
    groups that are nearly always right or nearly always wrong count most.
    """
    centred = rewards_g - rewards_g.mean()
    advantages: NDArray[np.float32] = (
        centred / (rewards_g.std() + np.float32(STD_FLOOR)) if scaled else centred
    )
    return advantages


@dataclass(frozen=True, slots=True)
class LossTotals:
    """What an optimizer step's losses are divided by. answers: those with tokens that count; tokens: these tokens."""

    tokens: int
    answers: int


def token_shares(mean: Mean, totals: LossTotals, answers_n: Tensor, *, constant: int) -> Tensor:
    """How much each token counts in the loss [n]; the shares of all micro-batches of an optimizer step add up.

    token      1 / tokens                   DAPO (Yu et al. 2025, arXiv 2503.14476): a long answer counts by its tokens
    sequence   1 / (answers * |o_i|)        GRPO, GSPO: every answer counts alike
    constant   1 / (answers * constant)     Dr. GRPO: no answer is dampened for its length; `constant` is in tokens
    """
    if mean == "token":
        return torch.full_like(answers_n, 1.0 / totals.tokens, dtype=torch.float32)
    if mean == "constant":
        return torch.full_like(answers_n, 1.0 / (totals.answers * constant), dtype=torch.float32)
    return 1.0 / (totals.answers * torch.bincount(answers_n)[answers_n])


def answer_means(values_n: Tensor, answers_n: Tensor) -> Tensor:
    """Each token gets its answer's mean [n]. answers_n: whose token it is; answers are numbered as they follow."""
    return torch.segment_reduce(values_n, "mean", lengths=torch.bincount(answers_n))[answers_n]


def policy_loss(
    logprobs_n: Tensor, weights_n: Tensor, advantages_n: Tensor, shares_n: Tensor
) -> Tensor:
    """-sum_t share_t w_t A_t log p_t, a scalar; only log p_t carries gradient.

    For a ratio rho = p/q the gradient of rho is rho times that of log p, so w = rho gives the policy gradient under
    importance sampling, and w = 0 where a clipped surrogate is flat (`corrections`).
    """
    return -(shares_n * weights_n * advantages_n * logprobs_n).sum()


def distance_to_base(logprobs_n: Tensor, base_logprobs_n: Tensor) -> Tensor:
    """k3 of each token [n], with gradient: b/p - log(b/p) - 1; its mean under samples of p is KL(p || base).

    GRPO's KL term (arXiv 2402.03300, eq. 4), after Schulman, "Approximating KL divergence" (2020). Never negative.
    """
    log_ratio_n = (base_logprobs_n - logprobs_n).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
    return log_ratio_n.exp() - log_ratio_n - 1.0
