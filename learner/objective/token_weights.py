"""Combine the corrections that a recipe names into one weight per token. Symbols as in
`corrections`.

    proximal     importance x   clip on k   weight                      m is the policy
    rollout      rho            rho         correct(x) * keeps(k)       (not used)
    recomputed   m / q          p / m       correct(x) * k * keeps(k)   before the step
    loglinear    m / q          p / m       correct(x) * k * keeps(k)   interpolated by version

Under gspo each log ratio is the mean over its answer. With one optimizer step per train step
`recomputed` has p = m, so nothing is clipped and the importance is rho. `correct` is the recipe's
correction. With "none" the weight is PPO's own ratio under `rollout`; under the others x counts as
1, which treats the data as fresh.

Suffixes of names: n = answer tokens of a micro-batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from learner.config import Recipe
from learner.objective.corrections import (
    clip_keeps,
    log_ratio,
    loglinear_share,
    mask_answers,
    mask_tokens,
    truncate,
)
from learner.objective.objectives import answer_means


@dataclass(frozen=True, slots=True)
class TokenWeights:
    """The result of `weigh` for each token [n], without gradient.

    log_ratio_n: log(p / q) of the token itself. keeps_n: whether the clip keeps it. corrected_n:
    whether the correction changed its ratio.
    """

    weights_n: Tensor
    log_ratio_n: Tensor
    keeps_n: Tensor
    corrected_n: Tensor


@dataclass(frozen=True, slots=True)
class WeightInputs:
    """What the weights depend on. proximal_n: log m, if it was computed. answers_n: index of each
    token's answer.
    """

    logprobs_n: Tensor
    rollout_logprobs_n: Tensor
    advantages_n: Tensor
    staleness_n: Tensor
    answers_n: Tensor
    proximal_n: Tensor | None = None


def weigh(recipe: Recipe, inputs: WeightInputs) -> TokenWeights:
    own_n = log_ratio(inputs.logprobs_n, inputs.rollout_logprobs_n)
    importance_n, trust_n = _split(recipe, inputs, own_n)
    if recipe.objective == "gspo":
        importance_n, trust_n = (
            answer_means(each, inputs.answers_n) for each in (importance_n, trust_n)
        )
    ratio_n, moved_n = importance_n.exp(), trust_n.exp()
    keeps_n = clip_keeps(
        moved_n,
        inputs.advantages_n,
        recipe.clip_eps_low,
        recipe.clip_eps_high,
        recipe.clip_ratio_max,
    )
    if recipe.correction == "none":
        return TokenWeights(moved_n * keeps_n, own_n, keeps_n, torch.zeros_like(keeps_n))
    corrected_n = _correct(recipe, importance_n, ratio_n, inputs.answers_n)
    factor_n = 1.0 if recipe.proximal == "rollout" else moved_n
    return TokenWeights(corrected_n * factor_n * keeps_n, own_n, keeps_n, corrected_n != ratio_n)


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
        return mask_tokens(ratio_n, recipe.mask_low, recipe.mask_high)
    truncated_n = truncate(ratio_n, recipe.tis_cap)
    if recipe.correction == "sequence_mask":
        return truncated_n * mask_answers(
            importance_n, answers_n, recipe.mask_low, recipe.mask_high
        )
    return truncated_n
