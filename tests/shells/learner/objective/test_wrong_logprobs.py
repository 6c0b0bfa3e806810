"""One answer with wrong logprobs does not decide a train step, or the recipe is refused.

The wrong logprobs are the lowest that the learner accepts, for each token of one answer in eight. So the learner
takes these tokens for ones that have become e^20 times as likely, or whatever the recipe bounds this ratio by.
"""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from echo2d.client import Batch, OperatorFault
from echo2d.learner.batch.packing import answers_of, whole_answers
from echo2d.learner.config import LearnerConfig
from echo2d.learner.model.policy import Policy
from echo2d.learner.objective.hooks import advantages_of
from echo2d.learner.ranks.ranks import Ranks
from tests.support.batches import RULES
from tests.support.learner import make_base, record

RECIPES = tuple(
    itertools.product(
        ("grpo", "dr_grpo", "gspo", "cispo", "rloo", "distill"),
        ("rollout", "recomputed", "loglinear"),
        ("none", "tis", "adaptive_clip", "sequence_tis", "icepop", "sequence_mask"),
        (0.0, 3.0),
    )
)
NAMES = ("objective", "proximal", "correction", "clip_ratio_max")
# The norm of the gradient with the wrong logprobs, divided by that without them.
NORM_MAX, UNBOUNDED = 2.0, 1e4
COSINE_MIN = 0.5


@pytest.fixture(scope="module")
def batch(base: Path) -> Batch:
    """Answers of the newest version; the rewards of a group are 0 and 1 in turn."""
    (found,) = record(base, 1)
    groups = tuple(
        dataclasses.replace(
            group,
            trajectories=tuple(
                dataclasses.replace(each, reward=float(each.sample % 2))
                for each in group.trajectories
            ),
        )
        for group in found.groups[:2]
    )
    return dataclasses.replace(found, groups=groups)


def with_wrong_logprobs(batch: Batch, sample: int) -> Batch:
    first, *others = batch.groups
    trajectories = tuple(
        dataclasses.replace(each, logprobs=np.full_like(each.logprobs, -104.0))
        if each.sample == sample
        else each
        for each in first.trajectories
    )
    return dataclasses.replace(
        batch, groups=(dataclasses.replace(first, trajectories=trajectories), *others)
    )


def gradient(policy: Policy, config: LearnerConfig, batch: Batch) -> Tensor:
    policy._config = config  # the same model for all recipes
    penalties = policy.penalties(whole_answers(batch, RULES)) if config.penalizes else {}
    groups = answers_of(batch, RULES, advantages_of(config), penalties)
    (part,) = policy.lay_out([[answer for group in groups for answer in group]])
    policy._gradient(part, RULES.staleness_max, {})
    found = torch.cat([weight.grad.flatten() for weight in policy.model.parameters()]).double()
    policy.model.zero_grad()
    return found


def refused(config: LearnerConfig) -> bool:
    try:
        dataclasses.replace(config, loss="")
    except OperatorFault as fault:
        assert "learner.clip_ratio_max, learner.correction" in str(fault)  # noqa: PT017
        return True
    return False


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("teachers"), layers=2)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kl_coef": 0.05},
        {"teacher_coef": 1.0},
        *(
            pytest.param(
                {"kl_coef": 0.05, "kl_estimator": name, "kl_in": where}, marks=pytest.mark.nightly
            )
            for name, where in (("k2", "loss"), ("k1", "reward"), ("k3", "reward"))
        ),
    ],
    ids=lambda changes: " ".join(map(str, changes.values())) or "no KL",
)
def test_a_recipe_bounds_the_gradient_of_an_answer_with_wrong_logprobs_or_is_refused(
    config: LearnerConfig, batch: Batch, teacher: Path, changes: dict[str, Any]
) -> None:
    taught = teacher if "teacher_coef" in changes else None
    common = dataclasses.replace(config, loss_tokens=9, teacher=taught, **changes)
    policy = Policy(common, Ranks())
    dice = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in policy.model.parameters():  # so that it differs from the base
            weight += 0.1 * weight.std() * torch.randn(weight.shape, generator=dice)
    # A teacher adds the same to all objectives.
    chosen = [
        each
        for each in RECIPES
        if each[1] == "recomputed" or each[2] != "adaptive_clip"  # it goes with `recomputed` only
        if (each[0] in ("grpo", "gspo", "distill") if taught else each[0] != "distill")
    ]
    for recipe in chosen:
        # A recipe with a loss of its own is never refused; this policy computes the objective all the same.
        settings: dict[str, Any] = dict(zip(NAMES, recipe, strict=True))
        own = dataclasses.replace(common, loss="own:loss", **settings)
        honest = gradient(policy, own, batch)
        others = [gradient(policy, own, with_wrong_logprobs(batch, sample)) for sample in (0, 1)]
        norm = max(float(each.norm() / honest.norm()) for each in others)
        cosine = min(float(each @ honest / each.norm() / honest.norm()) for each in others)
        is_refused = refused(own)
        print(f"{recipe}: norm x {norm:.3g}, cosine {cosine:.2f}, refused: {is_refused}")  # noqa: T201
        assert (norm > UNBOUNDED) if is_refused else (norm < NORM_MAX and cosine > COSINE_MIN)
