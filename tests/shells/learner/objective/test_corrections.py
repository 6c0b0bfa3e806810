"""Importance ratios and their bounds, part by part."""

import math

import pytest
import torch

from echo2d.learner.objective.corrections import (
    clip_keeps,
    log_ratio,
    loglinear_share,
    mask_answers,
    mask_tokens,
)
from echo2d.learner.objective.objectives import LOG_RATIO_MAX

EPS_LOW, HIGHEST = 0.2, 1.3


def test_the_ratio_is_new_over_rollout_probability_without_gradient() -> None:
    new = torch.tensor([0.5, 0.1, 0.2]).log().requires_grad_()
    ratio = log_ratio(new, torch.tensor([0.25, 0.2, 0.2]).log()).exp()
    assert ratio.tolist() == pytest.approx([2.0, 0.5, 1.0])
    assert not ratio.requires_grad


def test_the_ratio_is_finite_for_any_rollout_logprob() -> None:
    found = log_ratio(torch.tensor([0.0, -1e30]), torch.tensor([-1e30, 0.0]))
    assert found.tolist() == [LOG_RATIO_MAX, -LOG_RATIO_MAX]


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
        (9.9, -1.0, True),
    ],
)
def test_the_clip_drops_tokens_that_have_moved_far_enough(
    ratio: float, advantage: float, *, keeps: bool
) -> None:
    kept = clip_keeps(torch.tensor([ratio]), torch.tensor([advantage]), EPS_LOW, HIGHEST, 0.0)
    assert kept.tolist() == [keeps]


def test_the_two_sided_clip_also_drops_unlikely_answers_that_became_likely() -> None:
    ratio, advantages = torch.tensor([3.9, 4.1, 4.1]), torch.tensor([-1.0, -1.0, 0.0])
    assert clip_keeps(ratio, advantages, EPS_LOW, HIGHEST, 4.0).tolist() == [True, False, True]


def test_a_masked_token_does_not_count_and_the_others_count_by_their_ratio() -> None:
    assert mask_tokens(torch.tensor([0.4, 0.5, 1.5, 2.0, 2.1]), 0.5, 2.0).tolist() == [
        0.0,
        0.5,
        1.5,
        2.0,
        0.0,
    ]


def test_an_answer_is_masked_by_its_geometric_mean() -> None:
    ratio = torch.tensor([4.0, 1.0, 4.0, 2.0, 1.1])  # means 2 and (8.8)**(1/3) = 2.06
    answers = torch.tensor([0, 0, 1, 1, 1])
    assert mask_answers(ratio.log(), answers, 0.5, 2.0001).tolist() == [
        True,
        True,
        False,
        False,
        False,
    ]


@pytest.mark.parametrize(("staleness", "share"), [(0, 0.0), (1, 1 / 2), (6, 6 / 7)])
def test_the_loglinear_share_counts_versions(staleness: int, share: float) -> None:
    """AReaL's example: behaviour 3, proximal 9, made 10: 6/7."""
    assert loglinear_share(torch.tensor([staleness])).tolist() == pytest.approx([share])
    assert math.isfinite(share)
