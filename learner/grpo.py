"""Group-relative policy optimisation (GRPO, Shao et al. 2024, arXiv 2402.03300): advantages and loss, no KL term.

The loss is the mean over all answer tokens of a train step (as in DAPO, arXiv 2503.14476), not over trajectories:
a long answer counts by its tokens. One optimizer step per batch.

Suffixes of names: g = trajectories of a group, n = answer tokens of a micro-batch.
"""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

STD_FLOOR = 1e-4  # keeps a group of equal rewards at advantage 0


def group_advantages(rewards_g: NDArray[np.float32]) -> NDArray[np.float32]:
    """A_i = (r_i - mean(r)) / (std(r) + STD_FLOOR) [g], with the standard deviation of exactly these rewards."""
    advantages: NDArray[np.float32] = (rewards_g - rewards_g.mean()) / (rewards_g.std() + np.float32(STD_FLOOR))
    return advantages


def policy_loss(logprobs_n: Tensor, weights_n: Tensor, advantages_n: Tensor, step_tokens: int) -> Tensor:
    """-(1 / step_tokens) * sum_t w_t A_t log p_t, a scalar.

    weights_n carries no gradient. step_tokens counts the answer tokens of the *whole* train step, so the losses of its
    micro-batches add up.
    """
    return -(weights_n * advantages_n * logprobs_n).sum() / step_tokens
