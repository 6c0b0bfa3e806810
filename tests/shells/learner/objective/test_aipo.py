"""LlamaRL's AIPO: `proximal = "recomputed"` with `correction = "tis"`, at one optimizer step for each train step.

AIPO (asynchronous importance-weighted policy optimization; LlamaRL, arXiv 2505.24034) updates with

    sum over the tokens t of an answer:  min(pi(y_t) / mu(y_t), rho) * A * gradient of log pi(y_t)

mu wrote the answer, pi is trained. The importance ratio is cut off from above only, token by token, and is a
constant. A is the answer's reward less a baseline: here the mean of its group. prime-rl (docs/async.md, its default
loss) writes it as the objective, the mean of min(pi / mu, rho) * A over all tokens of the batch, whose gradient is
the same where no ratio exceeds rho. Both may have a KL and an entropy term beside it: `kl_coef` and `entropy_coef`
here, which are left out.
"""

import numpy as np
import pytest
import torch
from torch import Tensor

from echo2d.learner.config import Recipe
from echo2d.learner.objective.hooks import advantages_of
from echo2d.learner.objective.objectives import (
    LossTotals,
    policy_loss,
    surrogate_loss,
    token_shares,
)
from echo2d.learner.objective.token_weights import WeightInputs, weigh

RHO = 1.3
LENGTHS = ((3, 9, 5, 7), (2, 2, 8, 4), (6, 1, 4, 10))  # of the answers of three groups
REWARDS = ((1.0, 0.0, 0.0, 1.0), (0.5, 0.25, 1.0, 0.0), (1.0, 1.0, 1.0, 0.0))
TOKENS = sum(map(sum, LENGTHS))


def logprobs(distance: float) -> tuple[Tensor, Tensor]:
    """Logprobs of each token: those of pi, with a gradient, and those of mu, at most `distance` away."""
    generator = torch.Generator().manual_seed(0)
    mu = -0.2 - 2.0 * torch.rand(TOKENS, generator=generator)
    apart = distance * (2.0 * torch.rand(TOKENS, generator=generator) - 1.0)
    return (mu + apart).requires_grad_(), mu


def aipo(pi: Tensor, mu: Tensor) -> tuple[float, list[float]]:
    """The loss and its gradient, token by token, as published."""
    at = 0
    gradient: list[float] = []
    for rewards, lengths in zip(REWARDS, LENGTHS, strict=True):
        baseline = sum(rewards) / len(rewards)
        for reward, length in zip(rewards, lengths, strict=True):
            for log_pi, log_mu in zip(pi[at : at + length], mu[at : at + length], strict=True):
                ratio = float(np.exp(log_pi.item() - log_mu.item()))
                gradient.append(-min(ratio, RHO) * (reward - baseline) / TOKENS)
            at += length
    return sum(gradient), gradient  # the weight is the ratio itself, so both add up to the same


def ours(pi: Tensor, mu: Tensor) -> tuple[float, list[float]]:
    """What the learner shows as the loss, and its gradient. dr_grpo is the objective whose advantage is r - mean r."""
    recipe = Recipe(
        objective="dr_grpo",
        loss_mean="token",
        proximal="recomputed",
        correction="tis",
        tis_cap=RHO,
    )
    lengths = torch.tensor([length for group in LENGTHS for length in group])
    answers = torch.arange(len(lengths)).repeat_interleave(lengths)
    by_answer = np.concatenate(
        advantages_of(recipe)([np.array(group, dtype=np.float32) for group in REWARDS])
    )
    advantages = torch.from_numpy(by_answer)[answers]
    inputs = WeightInputs(pi, mu, advantages, torch.full((TOKENS,), 3), answers)
    shares = token_shares(
        recipe.mean, LossTotals(TOKENS, len(lengths)), lengths[answers], constant=0
    )
    found = weigh(recipe, inputs)
    loss = policy_loss(pi, found.weights_n, advantages, shares)
    (gradient,) = torch.autograd.grad(loss, pi)
    return surrogate_loss(found.surrogate_n, advantages, shares).item(), gradient.tolist()


def test_the_gradient_of_one_optimizer_step_is_that_of_aipo() -> None:
    pi, mu = logprobs(distance=0.6)
    ratios = (pi.detach() - mu).exp()
    assert 0.1 < (ratios > RHO).float().mean() < 0.5
    assert (ratios < 1.0 / RHO).any()  # not cut off from below
    loss, gradient = ours(pi, mu)
    expected_loss, expected = aipo(pi, mu)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5)


def test_the_gradient_is_that_of_the_objective_if_no_ratio_is_cut_off() -> None:
    pi, mu = logprobs(distance=0.2)
    assert (pi.detach() - mu).exp().max() < RHO
    rewards = [reward - sum(group) / len(group) for group in REWARDS for reward in group]
    lengths = torch.tensor([length for group in LENGTHS for length in group])
    advantages = torch.tensor(rewards).repeat_interleave(lengths)
    objective = ((pi - mu).exp().clamp(max=RHO) * advantages).mean()
    (expected,) = torch.autograd.grad(-objective, pi)
    loss, gradient = ours(pi, mu)
    assert loss == pytest.approx(-objective.item(), rel=1e-5)
    np.testing.assert_allclose(gradient, expected.tolist(), rtol=1e-5)
