"""Whole recipes: the loss that is shown, the tokens that a correction changed, and settings that do not go together.

Gradients are compared in `test_gradients.py`.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from echo2d.client import OperatorFault
from echo2d.learner.config import Recipe
from echo2d.learner.objective.objectives import LossTotals, surrogate_loss, token_shares
from echo2d.learner.objective.token_weights import WeightInputs, weigh

LOW, HIGH = 0.2, 0.3
COUNT = 200
ANSWERS = torch.arange(COUNT) // 10
LENGTHS = torch.full_like(ANSWERS, 10)


@pytest.fixture
def inputs() -> WeightInputs:
    """Fresh logprobs, and others up to 0.4 and 0.3 away from them."""
    generator = torch.Generator().manual_seed(0)

    def near(values: Tensor, distance: float) -> Tensor:
        return values + distance * (2 * torch.rand(COUNT, generator=generator) - 1)

    rollout = -torch.rand(COUNT, generator=generator) - 0.5
    proximal = near(rollout, 0.4)
    advantages = torch.randn(COUNT // 10, generator=generator)[ANSWERS]
    staleness = torch.randint(0, 4, (COUNT,), generator=generator)
    return WeightInputs(near(proximal, 0.3), rollout, advantages, staleness, ANSWERS, proximal)


def recipe(**choices: Any) -> Recipe:
    usual = {"clip_eps_low": LOW, "clip_eps_high": HIGH, "clip_ratio_max": 9.0, "loss_tokens": 7}
    return Recipe(**{**usual, **choices})


def value(recipe: Recipe, inputs: WeightInputs) -> Tensor:
    """The loss that is shown."""
    shares = token_shares(recipe.mean, LossTotals(COUNT, COUNT // 10), LENGTHS, constant=7)
    return surrogate_loss(weigh(recipe, inputs).surrogate_n, inputs.advantages_n, shares)


def surrogate(ratio: Tensor, advantages: Tensor, bound: float) -> Tensor:
    """The surrogate of PPO with the dual clip."""
    clipped = torch.minimum(ratio * advantages, ratio.clamp(1 - LOW, 1 + HIGH) * advantages)
    return torch.where(advantages < 0, torch.maximum(clipped, bound * advantages), clipped)


@pytest.mark.parametrize("objective", ["grpo", "dr_grpo"])
@pytest.mark.parametrize("bound", [9.0, 1.4])
def test_the_loss_that_is_shown_is_that_of_ppo_if_the_rollout_is_the_proximal_policy(
    inputs: WeightInputs, objective: str, bound: float
) -> None:
    rho = (inputs.logprobs_n - inputs.rollout_logprobs_n).exp()
    terms = surrogate(rho, inputs.advantages_n, bound)
    expected = terms.mean() if objective == "grpo" else terms.sum() / (COUNT // 10 * 7)
    chosen = recipe(objective=objective, correction="none", clip_ratio_max=bound)
    torch.testing.assert_close(value(chosen, inputs), -expected)


def test_the_loss_that_is_shown_is_that_of_decoupled_ppo(inputs: WeightInputs) -> None:
    assert inputs.proximal_n is not None
    importance = (inputs.proximal_n - inputs.rollout_logprobs_n).exp().clamp(max=1.2)
    moved = (inputs.logprobs_n - inputs.proximal_n).exp()
    expected = (importance * surrogate(moved, inputs.advantages_n, 9.0)).mean()
    found = value(recipe(proximal="recomputed", tis_cap=1.2), inputs)
    torch.testing.assert_close(found, -expected)


def test_each_objective_has_clips_and_masks_of_its_own() -> None:
    clips = {name: (Recipe(objective=name, loss_tokens=1)) for name in ("grpo", "gspo", "rloo")}
    found = {name: (each.clip_low, each.clip_high) for name, each in clips.items()}
    assert found == {"grpo": (0.2, 0.2), "gspo": (3e-4, 4e-4), "rloo": (0.2, 0.2)}
    assert Recipe(objective="gspo", clip_eps_low=0.1).clip_low == 0.1
    assert Recipe(correction="icepop").mask == (0.5, 5.0)
    assert Recipe(correction="sequence_mask", mask_high=1.5).mask == (0.5, 1.5)


@pytest.mark.parametrize("correction", ["icepop", "sequence_mask"])
def test_a_mask_reports_the_tokens_whose_ratio_it_changed(
    inputs: WeightInputs, correction: str
) -> None:
    first = dataclasses.replace(inputs, proximal_n=None)
    low, high = (0.8, 1.2) if correction == "icepop" else (0.95, 1.05)
    found = weigh(
        recipe(
            proximal="recomputed", correction=correction, mask_low=low, mask_high=high, tis_cap=1.1
        ),
        first,
    )
    log_rho = (inputs.logprobs_n - inputs.rollout_logprobs_n).numpy()
    if correction == "icepop":
        expected = [np.exp(each) if low <= np.exp(each) <= high else 0.0 for each in log_rho]
    else:
        means = np.exp([log_rho[at : at + 10].mean() for at in range(0, COUNT, 10)])
        expected = [
            min(np.exp(each), 1.1) * (low <= means[at // 10] <= high)
            for at, each in enumerate(log_rho)
        ]
    assert (
        found.corrected_n.tolist() == (~np.isclose(expected, np.exp(log_rho), rtol=1e-4)).tolist()
    )
    assert 0 < np.count_nonzero(expected) < COUNT


def test_adaptive_clip_widens_the_clip_of_truncated_tokens(inputs: WeightInputs) -> None:
    assert inputs.proximal_n is not None
    importance = (inputs.proximal_n - inputs.rollout_logprobs_n).exp()
    moved = (inputs.logprobs_n - inputs.proximal_n).exp()
    rises = inputs.advantages_n > 0
    highest = (1 + HIGH) * (importance / 1.1).clamp(1.0, 1.1)
    keeps = torch.where(rises, moved <= highest, moved >= 1 - LOW)
    found = weigh(recipe(proximal="recomputed", correction="adaptive_clip", tis_cap=1.1), inputs)
    torch.testing.assert_close(found.weights_n, importance.clamp(max=1.1) * moved * keeps)
    usual = weigh(recipe(proximal="recomputed", tis_cap=1.1), inputs)
    kept_besides = found.keeps_n & ~usual.keeps_n
    assert kept_besides.any()
    assert (importance[kept_besides] > 1.1).all()
    wrong = dataclasses.replace(inputs, rollout_logprobs_n=torch.full((COUNT,), -104.0))
    found = weigh(recipe(proximal="recomputed", correction="adaptive_clip", tis_cap=1.1), wrong)
    bound = 1.1 * 1.1 * (1 + HIGH)
    assert found.weights_n[rises].max() <= bound, (
        "a worker's wrong logprob does not remove the clip"
    )
    with pytest.raises(OperatorFault, match="expected proximal = recomputed; found rollout"):
        Recipe(correction="adaptive_clip")


def test_sequence_tis_truncates_the_product_of_an_answers_ratios(inputs: WeightInputs) -> None:
    found = weigh(recipe(correction="sequence_tis", tis_cap=1.5), inputs)
    log_rho = (inputs.logprobs_n - inputs.rollout_logprobs_n).reshape(-1, 10)
    products = log_rho.sum(1).exp()
    expected = products.clamp(max=1.5).repeat_interleave(10) * found.keeps_n
    torch.testing.assert_close(found.weights_n, expected)
    assert found.corrected_n.tolist() == (products > 1.5).repeat_interleave(10).tolist()
    assert found.corrected_n.any()
    assert (~found.corrected_n).any()


@pytest.mark.parametrize(
    ("choices", "line"),
    [
        ({"objective": "distill"}, "learner.teacher: expected a model directory"),
        (
            {"objective": "distill", "teacher": Path("t"), "kl_coef": 0.1, "kl_in": "reward"},
            "learner.kl_in: expected loss, because rewards do not count .*; found reward",
        ),
        (
            {"objective": "distill", "teacher": Path("t"), "advantages": "own:advantages"},
            "learner.advantages: expected none, because rewards do not count .*; found own:adv",
        ),
        (
            {"kl_coef": 0.1, "kl_estimator": "k1"},
            "learner.kl_estimator: expected k2 or k3 in the loss",
        ),
        (
            {"objective": "rloo", "advantage_std": "batch"},
            "learner.advantage_std: .* found rloo",
        ),
        (
            {"advantages": "own:advantages", "advantage_std": "batch"},
            "learner.advantage_std: .* found own:advantages .*@whole_batch",
        ),
        ({"objective": "dr_grpo"}, "learner.loss_tokens: expected at least 1"),
        ({"clip_ratio_max": 1.2}, "learner.clip_ratio_max: expected 0, or more than 1 "),
        (
            {"clip_ratio_max": 0.0, "correction": "none"},
            "learner.clip_ratio_max, learner.correction: .*; found 0, and rollout with none",
        ),
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
