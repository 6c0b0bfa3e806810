"""Advantages, means and loss, compared with numbers computed by hand or by numpy in another way."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from echo2d.learner.config import AdvantageBaseline
from echo2d.learner.objective.objectives import (
    LOG_RATIO_MAX,
    LossTotals,
    answer_means,
    batch_advantages,
    distance_to_base,
    group_advantages,
    means_of_answers,
    policy_loss,
    surrogate_loss,
    teacher_baseline,
    teacher_lead,
    token_shares,
)

ANSWERS = torch.tensor([0, 0, 0, 1, 2, 2])
LENGTHS = torch.tensor([3, 3, 3, 1, 2, 2])


@pytest.mark.parametrize(
    ("rewards", "advantages"),
    [
        ([1.0, 0.0, 0.0, 0.0], [1.5, -0.5, -0.5, -0.5]),  # mean 1/4, deviation 1/2
        ([2.0, -2.0], [0.5**0.5, -(0.5**0.5)]),
        ([1.0, 1.0, 1.0], [0.0, 0.0, 0.0]),
        ([0.7], [0.0]),
    ],
)
def test_advantages_are_measured_in_standard_deviations_of_their_group(
    rewards: list[float], advantages: list[float]
) -> None:
    found = group_advantages(np.array(rewards, dtype=np.float32), "scaled")
    assert found.dtype == np.float32
    assert found.tolist() == pytest.approx(advantages, abs=1e-3)


def test_the_deviation_of_the_population_is_smaller_than_that_of_a_sample() -> None:
    rewards = np.array([1.0, 0.0, 0.0, 0.0], dtype=np.float32)
    found = group_advantages(rewards, "scaled", sample_std=False)
    expected = [3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)]
    assert found.tolist() == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(
    ("baseline", "expected"),
    [("centred", [0.75, -0.25, -0.25, -0.25]), ("leave_one_out", [1.0, -1 / 3, -1 / 3, -1 / 3])],
)
def test_dr_grpo_subtracts_the_groups_mean_and_rloo_that_of_the_other_answers(
    baseline: AdvantageBaseline, expected: list[float]
) -> None:
    found = group_advantages(np.array([1.0, 0.0, 0.0, 0.0], dtype=np.float32), baseline)
    assert found.dtype == np.float32
    assert found.tolist() == pytest.approx(expected)


def test_the_share_of_a_token_depends_on_the_kind_of_mean() -> None:
    totals = LossTotals(tokens=6, answers=3)
    assert token_shares("token", totals, LENGTHS, constant=0).tolist() == pytest.approx([1 / 6] * 6)
    assert token_shares("sequence", totals, LENGTHS, constant=0).tolist() == pytest.approx(
        [1 / 9, 1 / 9, 1 / 9, 1 / 3, 1 / 6, 1 / 6]
    )
    assert token_shares("constant", totals, LENGTHS, constant=10).tolist() == pytest.approx(
        [1 / 30] * 6
    )


def test_each_token_gets_the_mean_of_its_answer() -> None:
    values = torch.tensor([1.0, 2.0, 6.0, 4.0, 0.0, 1.0])
    assert answer_means(values, ANSWERS).tolist() == [3.0, 3.0, 3.0, 4.0, 0.5, 0.5]


@pytest.mark.parametrize("mean", ["token", "sequence", "constant"])
def test_the_loss_is_the_papers_formula(mean: str) -> None:
    """-(1/T) sum_it, -(1/N) sum_i (1/|o_i|) sum_t and -(1/(N L)) sum_it of w A log p, written as loops."""
    rng = np.random.default_rng(3)
    logprobs, weights, advantages = rng.normal(size=(3, 6))
    terms = [logprobs[at] * weights[at] * advantages[at] for at in range(6)]
    answers = [terms[:3], terms[3:4], terms[4:]]
    expected = {
        "token": -sum(terms) / 6,
        "sequence": -np.mean([np.mean(answer) for answer in answers]),
        "constant": -np.mean([np.sum(answer) / 10 for answer in answers]),
    }[mean]
    shares = token_shares(mean, LossTotals(6, 3), LENGTHS, constant=10)  # type: ignore[arg-type]
    found = policy_loss(
        torch.tensor(logprobs), torch.tensor(weights), torch.tensor(advantages), shares
    )
    assert float(found) == pytest.approx(float(expected))


def test_losses_of_micro_batches_add_up() -> None:
    generator = torch.Generator().manual_seed(1)
    logprobs, weights, advantages = torch.randn(3, 6, generator=generator)
    whole = policy_loss(
        logprobs,
        weights,
        advantages,
        token_shares("sequence", LossTotals(6, 3), LENGTHS, constant=0),
    )
    parts = []
    for at in (slice(0, 4), slice(4, 6)):
        shares = token_shares("sequence", LossTotals(6, 3), LENGTHS[at], constant=0)
        parts.append(policy_loss(logprobs[at], weights[at], advantages[at], shares))
    torch.testing.assert_close(sum(parts), whole)


def test_the_gradient_is_minus_weight_times_advantage_times_share() -> None:
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    shares = torch.tensor([0.5, 0.25])
    torch.autograd.backward(
        policy_loss(logprobs, torch.tensor([1.5, 1.0]), torch.tensor([1.0, -2.0]), shares)
    )
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-0.75, 0.5])


def test_the_distance_to_the_base_averages_to_the_divergence() -> None:
    """Over samples of p: sum_x p(x) log(p(x) / b(x)), here over three outcomes."""
    p, base = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
    found = distance_to_base(torch.tensor(np.log(p)), torch.tensor(np.log(base))).numpy()
    assert (found >= 0).all()
    assert found[1] == 0
    assert (p * found).sum() == pytest.approx((p * np.log(p / base)).sum())


def test_a_distance_weighed_by_importance_averages_to_the_divergence_under_other_samples() -> None:
    """Over samples of q, and so does its gradient: that of sum_x p log(p / b) over the logits of p."""
    logits = torch.tensor([0.5, -0.2, 0.1], requires_grad=True)
    rollout, base = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.2, 0.3, 0.5])
    logprobs = torch.log_softmax(logits, dim=0)
    mean = (rollout * distance_to_base(logprobs, base.log(), rollout.log())).sum()
    divergence = (logprobs.exp() * (logprobs - base.log())).sum()
    torch.testing.assert_close(mean, divergence)
    slopes = [
        torch.autograd.grad(each, logits, retain_graph=True)[0] for each in (mean, divergence)
    ]
    torch.testing.assert_close(*slopes)


def slopes_of(*values: Tensor, logits: Tensor) -> list[Tensor]:
    return [torch.autograd.grad(each, logits, retain_graph=True)[0] for each in values]


@pytest.mark.parametrize("stale", [False, True])
def test_the_mean_gradient_of_each_estimator_is_the_one_that_is_documented(stale: bool) -> None:
    """Over samples of p: that of KL(p || b) for k2, that of KL(b || p) for k3, and 0 for k1. Over weighed samples of q:
    that of KL(p || b).
    """
    logits = torch.tensor([0.5, -0.2, 0.1], requires_grad=True)
    rollout, base = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.2, 0.3, 0.5])
    logprobs = torch.log_softmax(logits, dim=0)
    drawn = rollout if stale else logprobs.detach().exp()
    means = [
        (drawn * distance_to_base(logprobs, base.log(), drawn.log() if stale else None, name)).sum()
        for name in ("k1", "k2", "k3")
    ]
    reverse = (logprobs.exp() * (logprobs - base.log())).sum()
    forward = (base * (base.log() - logprobs)).sum()
    k1, k2, k3 = slopes_of(*means, logits=logits)
    first, second = slopes_of(reverse, forward, logits=logits)
    torch.testing.assert_close(k2, first)
    torch.testing.assert_close(k3, first if stale else second)
    torch.testing.assert_close(k1, first if stale else torch.zeros(3))


def test_a_teachers_advantages_give_the_gradient_of_the_reverse_divergence() -> None:
    logits = torch.tensor([0.5, -0.2, 0.1], requires_grad=True)
    teacher = torch.tensor([0.2, 0.3, 0.5])
    logprobs = torch.log_softmax(logits, dim=0)
    lead = teacher_lead(logprobs, teacher.log())
    divergence = (logprobs.exp() * (logprobs - teacher.log())).sum()
    assert not lead.requires_grad
    assert float(-(logprobs.detach().exp() * lead).sum()) == pytest.approx(
        float(divergence.detach())
    )
    loss = policy_loss(logprobs, torch.ones(3), lead, logprobs.detach().exp())
    torch.testing.assert_close(*slopes_of(loss, divergence, logits=logits))


def test_an_answer_with_wrong_logprobs_hardly_moves_a_teachers_baseline() -> None:
    honest = [-0.5, -0.4, -0.3, -0.2, -0.1, 0.0, 0.1, 0.2]
    assert teacher_baseline(honest) == pytest.approx(np.mean(honest))
    for wrong in (LOG_RATIO_MAX, -LOG_RATIO_MAX):
        assert abs(teacher_baseline([*honest, wrong]) - np.mean(honest)) < 0.1
    assert teacher_baseline([-0.3]) == pytest.approx(-0.3)
    assert math.isnan(teacher_baseline([*honest, math.nan]))  # nothing is applied


def test_means_of_answers_leave_out_answers_without_tokens() -> None:
    values, answers = torch.tensor([1.0, 3.0, 5.0]), torch.tensor([0, 0, 2])
    assert means_of_answers(values, answers).tolist() == [2.0, 5.0]


def test_advantages_over_a_batch_are_centred_in_groups_and_scaled_together() -> None:
    rewards = [[1.0, 0.0, 0.0], [0.5, 0.4], [2.0]]
    found = batch_advantages([np.array(each, dtype=np.float32) for each in rewards])
    centred = [value - sum(each) / len(each) for each in rewards for value in each]
    expected = np.array(centred) / (np.std(centred, ddof=1) + 1e-4)
    assert np.concatenate(found) == pytest.approx(expected, rel=1e-5)
    assert [len(each) for each in found] == [3, 2, 1]
    assert batch_advantages([np.ones(3, dtype=np.float32)])[0].tolist() == [0.0] * 3


def test_the_surrogate_is_a_mean_that_has_no_gradient() -> None:
    ratio = torch.tensor([1.2, 0.9], requires_grad=True)
    found = surrogate_loss(ratio, torch.tensor([1.0, -1.0]), torch.tensor([0.5, 0.5]))
    assert float(found) == pytest.approx(-0.15)
    assert not found.requires_grad
