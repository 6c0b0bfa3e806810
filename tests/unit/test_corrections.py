"""Importance ratios, truncation and the clip, against PPO's surrogate differentiated by autograd."""

import math

import pytest
import torch

from learner.corrections import LOG_RATIO_MAX, clip_keeps, importance_ratio, truncate
from learner.grpo import policy_loss

EPS_LOW, EPS_HIGH, CAP = 0.2, 0.3, 2.0


def test_the_ratio_is_new_over_rollout_probability_without_gradient() -> None:
    new = torch.tensor([0.5, 0.1, 0.2]).log().requires_grad_()
    old = torch.tensor([0.25, 0.2, 0.2]).log()
    ratio = importance_ratio(new, old)
    assert ratio.tolist() == pytest.approx([2.0, 0.5, 1.0])
    assert not ratio.requires_grad


def test_the_ratio_is_finite_whatever_the_rollout_says() -> None:
    ratio = importance_ratio(torch.tensor([0.0, -1e30]), torch.tensor([-1e30, 0.0]))
    assert ratio.tolist() == pytest.approx([math.exp(LOG_RATIO_MAX), math.exp(-LOG_RATIO_MAX)])


@pytest.mark.parametrize(
    ("ratio", "advantage", "keeps"),
    [
        (1.0, 1.0, True),
        (1.31, 1.0, False),
        (1.29, 1.0, True),
        (1.31, -1.0, True),
        (0.79, 1.0, True),
        (0.79, -1.0, False),
        (0.81, -1.0, True),
        (9.9, 0.0, True),
    ],
)
def test_the_clip_drops_what_has_moved_far_enough(ratio: float, advantage: float, *, keeps: bool) -> None:
    kept = clip_keeps(torch.tensor([ratio]), torch.tensor([advantage]), EPS_LOW, EPS_HIGH)
    assert kept.tolist() == [keeps]


def test_truncation_bounds_large_ratios_only() -> None:
    assert truncate(torch.tensor([0.1, 1.9, 2.1, 50.0]), CAP).tolist() == pytest.approx([0.1, 1.9, 2.0, 2.0])


def test_the_weights_give_the_gradient_of_ppos_surrogate() -> None:
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(200, generator=generator)
    new = (old + 0.6 * torch.rand(200, generator=generator) - 0.3).requires_grad_()
    advantages = torch.randn(200, generator=generator)

    rho = (new - old).exp()
    surrogate = torch.minimum(rho * advantages, rho.clamp(1 - EPS_LOW, 1 + EPS_HIGH) * advantages).mean()
    (expected,) = torch.autograd.grad(-surrogate, new)

    ratio = importance_ratio(new, old)
    weights = truncate(ratio, CAP) * clip_keeps(ratio, advantages, EPS_LOW, EPS_HIGH)
    (actual,) = torch.autograd.grad(policy_loss(new, weights, advantages, len(new)), new)
    torch.testing.assert_close(actual, expected)
