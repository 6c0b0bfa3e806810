"""Advantages and loss, against numbers worked out by hand."""

import numpy as np
import pytest
import torch

from learner.grpo import group_advantages, policy_loss


@pytest.mark.parametrize(
    ("rewards", "advantages"),
    [
        ([1.0, 0.0, 0.0, 0.0], [3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)]),  # mean 1/4, deviation sqrt(3)/4
        ([2.0, -2.0], [1.0, -1.0]),
        ([1.0, 1.0, 1.0], [0.0, 0.0, 0.0]),
        ([0.7], [0.0]),
    ],
)
def test_advantages_are_rewards_in_units_of_their_groups_deviation(
    rewards: list[float], advantages: list[float]
) -> None:
    found = group_advantages(np.array(rewards, dtype=np.float32))
    assert found.dtype == np.float32
    assert found.tolist() == pytest.approx(advantages, abs=1e-3)


def test_the_loss_is_the_mean_over_all_tokens_of_the_step() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -4.0])
    weights = torch.tensor([1.0, 0.5, 0.0])
    advantages = torch.tensor([1.0, -1.0, 3.0])
    assert float(policy_loss(logprobs, weights, advantages, 3)) == pytest.approx((1.0 - 1.0) / 3)
    assert float(policy_loss(logprobs[:1], weights[:1], advantages[:1], 4)) == pytest.approx(0.25)


def test_losses_of_micro_batches_add_up() -> None:
    generator = torch.Generator().manual_seed(1)
    logprobs, weights, advantages = torch.randn(3, 12, generator=generator)
    parts = [policy_loss(logprobs[at], weights[at], advantages[at], 12) for at in (slice(0, 5), slice(5, 12))]
    torch.testing.assert_close(sum(parts), policy_loss(logprobs, weights, advantages, 12))


def test_its_gradient_is_minus_weight_times_advantage_over_tokens() -> None:
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    torch.autograd.backward(policy_loss(logprobs, torch.tensor([1.5, 1.0]), torch.tensor([1.0, -2.0]), 2))
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-0.75, 1.0])
