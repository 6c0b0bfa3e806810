"""Whole recipes: gradients compared with the papers' surrogates, differentiated by autograd or written in numpy."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from echo2d.client import OperatorFault
from echo2d.learner.config import Recipe
from echo2d.learner.objective.objectives import (
    LossTotals,
    policy_loss,
    surrogate_loss,
    token_shares,
)
from echo2d.learner.objective.token_weights import WeightInputs, weigh

LOW, HIGH = 0.2, 0.3
COUNT = 200
ANSWERS = torch.arange(COUNT) // 10
LENGTHS = torch.full_like(ANSWERS, 10)


@pytest.fixture
def inputs() -> WeightInputs:
    """Fresh logprobs that carry gradient, and others up to 0.4 and 0.3 away from them."""
    generator = torch.Generator().manual_seed(0)

    def near(values: Tensor, distance: float) -> Tensor:
        return values + distance * (2 * torch.rand(COUNT, generator=generator) - 1)

    rollout = -torch.rand(COUNT, generator=generator) - 0.5
    proximal = near(rollout, 0.4)
    advantages = torch.randn(COUNT // 10, generator=generator)[ANSWERS]
    staleness = torch.randint(0, 4, (COUNT,), generator=generator)
    return WeightInputs(
        near(proximal, 0.3).requires_grad_(), rollout, advantages, staleness, ANSWERS, proximal
    )


def gradient(recipe: Recipe, inputs: WeightInputs) -> Tensor:
    shares = token_shares(recipe.mean, LossTotals(COUNT, COUNT // 10), LENGTHS, constant=7)
    loss = policy_loss(
        inputs.logprobs_n, weigh(recipe, inputs).weights_n, inputs.advantages_n, shares
    )
    return torch.autograd.grad(loss, inputs.logprobs_n)[0]


def recipe(**choices: Any) -> Recipe:
    usual = {"clip_eps_low": LOW, "clip_eps_high": HIGH, "clip_ratio_max": 0.0, "loss_tokens": 7}
    return Recipe(**{**usual, **choices})


def value(recipe: Recipe, inputs: WeightInputs) -> Tensor:
    """The loss that is shown."""
    shares = token_shares(recipe.mean, LossTotals(COUNT, COUNT // 10), LENGTHS, constant=7)
    return surrogate_loss(weigh(recipe, inputs).surrogate_n, inputs.advantages_n, shares)


def surrogate(ratio: Tensor, advantages: Tensor, bound: float = float("inf")) -> Tensor:
    """The surrogate of PPO; with a bound, that of the dual clip."""
    clipped = torch.minimum(ratio * advantages, ratio.clamp(1 - LOW, 1 + HIGH) * advantages)
    return torch.where(advantages < 0, torch.maximum(clipped, bound * advantages), clipped)


@pytest.mark.parametrize("objective", ["grpo", "dr_grpo"])
@pytest.mark.parametrize("bound", [0.0, 1.4])
def test_the_gradient_is_that_of_ppo_if_the_rollout_is_the_proximal_policy(
    inputs: WeightInputs, objective: str, bound: float
) -> None:
    rho = (inputs.logprobs_n - inputs.rollout_logprobs_n).exp()
    terms = surrogate(rho, inputs.advantages_n, bound or float("inf"))
    expected = terms.mean() if objective == "grpo" else terms.sum() / (COUNT // 10 * 7)
    chosen = recipe(objective=objective, correction="none", clip_ratio_max=bound)
    torch.testing.assert_close(value(chosen, inputs), -expected.detach())
    found = gradient(chosen, inputs)
    torch.testing.assert_close(found, torch.autograd.grad(-expected, inputs.logprobs_n)[0])


def test_gspo_clips_whole_answers(inputs: WeightInputs) -> None:
    """(1/N) sum_i min(s_i A_i, clip(s_i) A_i), s_i the geometric mean of the answer's ratios."""
    by_answer = (inputs.logprobs_n - inputs.rollout_logprobs_n).reshape(-1, 10).mean(1).exp()
    low, high = 0.02, 0.03
    advantages = inputs.advantages_n[::10]
    objective = torch.minimum(
        by_answer * advantages, by_answer.clamp(1 - low, 1 + high) * advantages
    ).mean()
    found = gradient(
        recipe(objective="gspo", correction="none", clip_eps_low=low, clip_eps_high=high), inputs
    )
    torch.testing.assert_close(found, torch.autograd.grad(-objective, inputs.logprobs_n)[0])
    assert 0 < (found.reshape(-1, 10) == 0).all(1).sum() < COUNT // 10


def test_decoupled_ppo_weighs_by_importance_and_clips_the_rest(inputs: WeightInputs) -> None:
    assert inputs.proximal_n is not None
    importance = (inputs.proximal_n - inputs.rollout_logprobs_n).exp().clamp(max=1.2)
    objective = (
        importance * surrogate((inputs.logprobs_n - inputs.proximal_n).exp(), inputs.advantages_n)
    ).mean()
    torch.testing.assert_close(
        value(recipe(proximal="recomputed", tis_cap=1.2), inputs), -objective.detach()
    )
    found = gradient(recipe(proximal="recomputed", tis_cap=1.2), inputs)
    torch.testing.assert_close(found, torch.autograd.grad(-objective, inputs.logprobs_n)[0])


def test_cispo_truncates_and_never_clips(inputs: WeightInputs) -> None:
    """-(1/T) sum min(rho, cap) A log p with the ratio as a constant (MiniMax-M1, arXiv 2506.13585, eq. 4)."""
    rho = (inputs.logprobs_n - inputs.rollout_logprobs_n).exp().detach().clamp(max=1.2)
    objective = (rho * inputs.advantages_n * inputs.logprobs_n).mean()
    chosen = Recipe(objective="cispo", tis_cap=1.2, clip_ratio_max=1.1)
    assert weigh(chosen, inputs).keeps_n.all()
    torch.testing.assert_close(
        gradient(chosen, inputs), torch.autograd.grad(-objective, inputs.logprobs_n)[0]
    )


def test_each_objective_has_clips_and_masks_of_its_own() -> None:
    clips = {name: (Recipe(objective=name, loss_tokens=1)) for name in ("grpo", "gspo", "rloo")}
    found = {name: (each.clip_low, each.clip_high) for name, each in clips.items()}
    assert found == {"grpo": (0.2, 0.2), "gspo": (3e-4, 4e-4), "rloo": (0.2, 0.2)}
    assert Recipe(objective="gspo", clip_eps_low=0.1).clip_low == 0.1
    assert Recipe(correction="icepop").mask == (0.5, 5.0)
    assert Recipe(correction="sequence_mask", mask_high=1.5).mask == (0.5, 1.5)


def test_loglinear_interpolates_the_proximal_policy_by_version(inputs: WeightInputs) -> None:
    new, old = inputs.logprobs_n.detach().numpy(), inputs.rollout_logprobs_n.numpy()
    staleness = inputs.staleness_n.numpy()
    proximal = old + staleness / (staleness + 1) * (new - old)
    importance, moved = np.minimum(np.exp(proximal - old), 2.0), np.exp(new - proximal)
    advantages = inputs.advantages_n.numpy()
    flat = ((advantages > 0) & (moved > 1 + HIGH)) | ((advantages < 0) & (moved < 1 - LOW))
    found = weigh(recipe(proximal="loglinear"), inputs)
    np.testing.assert_allclose(found.weights_n.numpy(), importance * moved * ~flat, rtol=1e-5)
    assert found.keeps_n.tolist() == (~flat).tolist()
    assert flat.any()


def test_recomputed_is_truncated_importance_sampling_with_one_optimizer_step(
    inputs: WeightInputs,
) -> None:
    first = WeightInputs(
        inputs.logprobs_n,
        inputs.rollout_logprobs_n,
        inputs.advantages_n,
        inputs.staleness_n,
        ANSWERS,
    )
    found = weigh(recipe(proximal="recomputed"), first)
    rho = np.exp((inputs.logprobs_n.detach() - inputs.rollout_logprobs_n).numpy())
    np.testing.assert_allclose(found.weights_n.numpy(), np.minimum(rho, 2.0), rtol=1e-6)
    assert found.keeps_n.all()
    fresh = weigh(recipe(proximal="recomputed", correction="none"), first)
    assert (fresh.weights_n == 1).all()


@pytest.mark.parametrize("correction", ["icepop", "sequence_mask"])
def test_masks_leave_out_tokens_or_answers(inputs: WeightInputs, correction: str) -> None:
    first = WeightInputs(
        inputs.logprobs_n,
        inputs.rollout_logprobs_n,
        inputs.advantages_n,
        inputs.staleness_n,
        ANSWERS,
    )
    low, high = (0.8, 1.2) if correction == "icepop" else (0.95, 1.05)
    found = weigh(
        recipe(
            proximal="recomputed", correction=correction, mask_low=low, mask_high=high, tis_cap=1.1
        ),
        first,
    )
    log_rho = (inputs.logprobs_n.detach() - inputs.rollout_logprobs_n).numpy()
    if correction == "icepop":
        expected = [np.exp(each) if low <= np.exp(each) <= high else 0.0 for each in log_rho]
    else:
        means = np.exp([log_rho[at : at + 10].mean() for at in range(0, COUNT, 10)])
        expected = [
            min(np.exp(each), 1.1) * (low <= means[at // 10] <= high)
            for at, each in enumerate(log_rho)
        ]
    np.testing.assert_allclose(found.weights_n.numpy(), expected, rtol=1e-5)
    assert (
        found.corrected_n.tolist() == (~np.isclose(expected, np.exp(log_rho), rtol=1e-4)).tolist()
    )
    assert 0 < np.count_nonzero(expected) < COUNT


@pytest.mark.parametrize(
    ("choices", "line"),
    [
        ({"objective": "dr_grpo"}, "learner.loss_tokens: expected at least 1"),
        ({"clip_ratio_max": 1.2}, "learner.clip_ratio_max: expected 0, or more than 1 "),
    ],
)
def test_options_that_do_not_go_together_are_the_operators_fault(
    choices: dict[str, Any], line: str
) -> None:
    with pytest.raises(OperatorFault, match=line):
        Recipe(**choices)


def test_each_objective_has_its_own_mean_unless_one_is_chosen() -> None:
    names = ("grpo", "dr_grpo", "gspo", "cispo", "rloo")
    expected = ["token", "constant", "sequence", "token", "token"]
    assert [recipe(objective=name).mean for name in names] == expected
    assert recipe(loss_mean="sequence").mean == "sequence"
