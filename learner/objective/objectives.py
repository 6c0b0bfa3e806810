"""Compute the objective of a train step: advantages, token shares, policy loss, distance to the
base.

| objective | advantage of answer i of a group | ratio | mean | arXiv |
| --- | --- | --- | --- | --- |
| grpo | (r_i - mean r) / (std r + STD_FLOOR) | of a token, clipped | token, as in DAPO | 2402.03300 |
| dr_grpo | r_i - mean r | of a token, clipped | constant | 2503.20783 |
| gspo | as grpo | geometric mean over an answer, clipped | sequence | 2507.18071 |
| cispo | as grpo | of a token, truncated, not clipped | token | 2506.13585 |
| rloo | r_i - mean of the others' r | of a token, clipped | token | 2402.14740 |
| distill | 0; as in all others, a teacher adds to it | of a token, clipped | token | 2306.13649 |

Not here: importance ratios and clips (`corrections`), and what a run has chosen (`config.Recipe`).

Suffixes of names: g = episodes of a group, n = answer tokens of a micro-batch, a = its answers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echo2d.learner.config import AdvantageBaseline, Estimator, Mean

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
    if baseline == "zero":
        return np.zeros_like(rewards_g)
    if baseline == "centred" or not others:
        return centred
    if baseline == "leave_one_out":
        return np.asarray(centred * np.float32((others + 1) / others))
    deviation = rewards_g.std(ddof=1 if sample_std else 0)
    # A group of equal rewards keeps advantage 0.
    return np.asarray(centred / (deviation + np.float32(1e-4)))


def batch_advantages(rewards: Sequence[NDArray[np.float32]]) -> list[NDArray[np.float32]]:
    """Return A [g] of each group, from the rewards [g] of all groups of a batch: r_i - mean r of its group, divided by
    the standard deviation of these differences over the whole batch. Their mean over the batch is 0.

    REINFORCE++ with the group's mean as baseline (Hu et al. 2025, arXiv 2501.03262). A group of nearly equal rewards
    gets small advantages, which `scaled` would enlarge. Each answer counts once; verl weighs answers by their tokens.
    """
    centred = [rewards_g - rewards_g.mean() for rewards_g in rewards]
    every = np.concatenate(centred)
    deviation = np.sqrt(np.square(every).sum() / max(1, len(every) - 1))
    return [np.asarray(each / (deviation + np.float32(1e-4))) for each in centred]


def teacher_lead(logprobs_n: Tensor, teacher_logprobs_n: Tensor) -> Tensor:
    """log t - log p [n] without gradient, for the teacher's probability t: what a teacher adds to the advantage of a
    token, before its baseline and its coefficient.

    Its negative is k1 of KL(p || t), and the mean of -(log t - log p) grad log p under samples of p is the gradient of
    this KL of the token's distribution: on-policy distillation (Agarwal et al. 2023, arXiv 2306.13649; MiniLLM, arXiv
    2306.08543; Lu, "On-Policy Distillation", Thinking Machines 2025). As in the last of these, a token answers for its
    own KL and not for those of the tokens after it. p is the learner's probability and not the rollout's, so that
    an answer with wrong logprobs does not get large advantages.
    """
    return (teacher_logprobs_n - logprobs_n.detach()).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)


def teacher_baseline(means: Sequence[float]) -> float:
    """What is subtracted from the lead of each token of an optimizer step. means: of each answer, the mean of
    log t - log q over its tokens, for the rollout's q.

    All leads of a pupil that is far from its teacher are negative, so without a baseline whatever is drawn becomes
    less likely. A baseline does not change the mean of the gradient. This one is the winsorized mean: means beyond a
    quartile count as that quartile, so that an answer with wrong logprobs hardly moves it.
    """
    low, high = np.quantile(means, (0.25, 0.75))
    return float(np.clip(means, low, high).mean())


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


def answer_means(values_n: Tensor, answers_n: Tensor, reduce: str = "mean") -> Tensor:
    """Replace each token's value by the mean over its answer [n], or by the sum. answers_n: index of each
    token's answer, ascending.
    """
    return torch.segment_reduce(values_n, reduce, lengths=torch.bincount(answers_n))[answers_n]


def means_of_answers(values_n: Tensor, answers_n: Tensor) -> Tensor:
    """The mean over each answer that has tokens [a]; `answers_n` as above."""
    _, lengths = torch.unique_consecutive(answers_n, return_counts=True)
    return torch.segment_reduce(values_n, "mean", lengths=lengths)


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
    logprobs_n: Tensor,
    base_logprobs_n: Tensor,
    rollout_logprobs_n: Tensor | None = None,
    estimator: Estimator = "k3",
) -> Tensor:
    """The KL(p || base) of each token [n], with gradient.

    k1    -log(b/p)              its mean under samples of p is the KL; its gradient has mean 0
    k2    log(b/p)^2 / 2         the mean of its gradient is the gradient of KL(p || base)
    k3    b/p - log(b/p) - 1     its mean is the KL; the mean of its gradient is the gradient of KL(base || p)

    Schulman, "Approximating KL divergence" (2020); gradients: arXiv 2510.01555. k3 is GRPO's term (arXiv
    2402.03300, eq. 4). k2 and k3 are never negative. rollout_logprobs_n: if given, each term is multiplied by
    p/q, because the tokens are samples of the rollout's policy q. For k3 this factor has a gradient too
    (DeepSeek-V3.2, arXiv 2512.02556), for k2 it is a constant: then the gradient of both is that of KL(p || base),
    in the mean, and they are the same token by token. p/q is at most e^5.
    """
    log_ratio_n = (base_logprobs_n - logprobs_n).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
    if estimator == "k1":
        distance_n = -log_ratio_n
    elif estimator == "k2":
        distance_n = log_ratio_n.square() / 2
    else:
        distance_n = log_ratio_n.exp() - log_ratio_n - 1.0
    if rollout_logprobs_n is None:
        return distance_n
    # With a larger bound than e^5 = 148, one answer with wrong logprobs could decide the step.
    moved_n = (logprobs_n - rollout_logprobs_n).clamp(-LOG_RATIO_MAX, 5.0)
    if estimator == "k2":
        moved_n = moved_n.detach()
    return moved_n.exp() * distance_n
