"""Combine the corrections that a recipe names into one weight per token. Symbols as in
`corrections`.

    proximal     importance x   clip on k   weight                      m is the policy
    rollout      rho            rho         correct(x) * keeps(k)       (not used)
    recomputed   m / q          p / m       correct(x) * k * keeps(k)   before the step
    loglinear    m / q          p / m       correct(x) * k * keeps(k)   interpolated by version

Under gspo each log ratio is the mean over its answer. With one optimizer step per train step
`recomputed` has p = m, so nothing is clipped and the importance is rho. `correct` is the recipe's
correction; `sequence_tis` replaces x by its product over the answer, `adaptive_clip` widens the clip. With "none" the
weight under `rollout` is PPO's own ratio; under the other two x counts as 1, as if the data were fresh.

Suffixes of names: n = answer tokens of a micro-batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from echo2d.learner.config import Recipe
from echo2d.learner.objective.corrections import (
    clip_keeps,
    clip_value,
    log_ratio,
    loglinear_share,
    mask_answers,
    mask_tokens,
    widened,
)
from echo2d.learner.objective.objectives import LOG_RATIO_MAX, answer_means


@dataclass(frozen=True, slots=True)
class TokenWeights:
    """The result of `weigh` for each token [n], without gradient."""

    weights_n: Tensor
    # The ratio in the surrogate loss: weights_n, except that where the clip is flat it is that of the corner.
    surrogate_n: Tensor
    log_ratio_n: Tensor  # log(p / q) of the token itself
    keeps_n: Tensor  # whether the clip keeps the token
    corrected_n: Tensor  # whether the correction changed the token's ratio


@dataclass(frozen=True, slots=True)
class WeightInputs:
    """All that the weights, and an operator's own loss, depend on, for each token [n]."""

    logprobs_n: Tensor  # with gradient
    rollout_logprobs_n: Tensor
    advantages_n: Tensor
    staleness_n: Tensor
    answers_n: Tensor  # index of each token's answer
    proximal_n: Tensor | None = None  # log m, if it was computed
    entropy_n: Tensor | None = None  # with gradient


def weigh(recipe: Recipe, inputs: WeightInputs) -> TokenWeights:
    own_n = log_ratio(inputs.logprobs_n, inputs.rollout_logprobs_n)
    importance_n, trust_n = _split(recipe, inputs, own_n)
    if recipe.objective == "gspo":
        importance_n, trust_n = (
            answer_means(each, inputs.answers_n) for each in (importance_n, trust_n)
        )
    if recipe.correction == "sequence_tis":
        product_n = answer_means(importance_n, inputs.answers_n, "sum")
        importance_n = product_n.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
    ratio_n, moved_n = importance_n.exp(), trust_n.exp()
    ratio_max = 0.0 if recipe.objective == "cispo" else recipe.clip_ratio_max
    high: float | Tensor = 1.0 + recipe.clip_high
    if recipe.correction == "adaptive_clip":
        high = widened(1.0 + recipe.clip_high, ratio_n, recipe.tis_cap)
    clip = (moved_n, inputs.advantages_n, recipe.clip_low, high, ratio_max)
    keeps_n, clipped_n = clip_keeps(*clip), clip_value(*clip)
    if recipe.correction == "none":
        return TokenWeights(moved_n * keeps_n, clipped_n, own_n, keeps_n, torch.zeros_like(keeps_n))
    corrected_n = _correct(recipe, importance_n, ratio_n, inputs.answers_n)
    # Under `rollout` the importance is the clipped ratio itself, and counts once.
    once = recipe.proximal == "rollout"
    whole_n = corrected_n if once else corrected_n * moved_n
    corner_n = clipped_n * (corrected_n > 0) if once else corrected_n * clipped_n
    shown_n = torch.where(keeps_n, whole_n, corner_n)
    return TokenWeights(whole_n * keeps_n, shown_n, own_n, keeps_n, corrected_n != ratio_n)


def _split(recipe: Recipe, inputs: WeightInputs, own_n: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log importance and the log ratio that is clipped, each [n]."""
    if recipe.proximal == "rollout":
        return own_n, own_n
    if recipe.proximal == "loglinear":
        importance_n = loglinear_share(inputs.staleness_n) * own_n
    elif inputs.proximal_n is None:
        importance_n = own_n
    else:
        importance_n = log_ratio(inputs.proximal_n, inputs.rollout_logprobs_n)
    return importance_n, own_n - importance_n


def _correct(recipe: Recipe, importance_n: Tensor, ratio_n: Tensor, answers_n: Tensor) -> Tensor:
    if recipe.correction == "icepop":
        return mask_tokens(ratio_n, *recipe.mask)
    # Without the cap a few tokens that have become much more likely would dominate the step.
    truncated_n = ratio_n.clamp(max=recipe.tis_cap)
    if recipe.correction == "sequence_mask":
        return truncated_n * mask_answers(importance_n, answers_n, *recipe.mask)
    return truncated_n
