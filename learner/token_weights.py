"""A weight for each token: the corrections that a run's recipe names, put together.

    proximal     importance x    clip on k       weight
    rollout      rho             rho             correct(x) * keeps(k)
    recomputed   m / q           p / m           correct(x) * k * keeps(k)     m: before the first optimizer step
    loglinear    m / q           p / m           the same                      m: from the versions of the spans

Under gspo each log ratio is its answer's mean. With one optimizer step per train step, `recomputed` has p = m: no clip,
importance rho. `correct` is a correction; "none" leaves PPO's own ratio under `rollout`, and takes x for 1 under the
others: the policy gradient as if the data were fresh.

Suffixes of names: n = answer tokens of a micro-batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from learner.config import Recipe
from learner.corrections import (
    clip_keeps,
    log_ratio,
    loglinear_share,
    mask_answers,
    mask_tokens,
    truncate,
)
from learner.objectives import answer_means


@dataclass(frozen=True, slots=True)
class TokenWeights:
    """What `weigh` found, of each token [n], without gradient.

    log_ratio_n: of p to q, the token's own. keeps_n: the clip lets it through. corrected_n: the correction changed it.
    """

    weights_n: Tensor
    log_ratio_n: Tensor
    keeps_n: Tensor
    corrected_n: Tensor


@dataclass(frozen=True, slots=True)
class Seen:
    """What the weights depend on. proximal_n: log m, where it was computed. answers_n: whose token it is."""

    logprobs_n: Tensor
    rollout_logprobs_n: Tensor
    advantages_n: Tensor
    staleness_n: Tensor
    answers_n: Tensor
    proximal_n: Tensor | None = None


def weigh(recipe: Recipe, seen: Seen) -> TokenWeights:
    own_n = log_ratio(seen.logprobs_n, seen.rollout_logprobs_n)
    importance_n, trust_n = _split(recipe, seen, own_n)
    if recipe.objective == "gspo":
        importance_n, trust_n = (
            answer_means(each, seen.answers_n) for each in (importance_n, trust_n)
        )
    ratio_n, moved_n = importance_n.exp(), trust_n.exp()
    keeps_n = clip_keeps(
        moved_n, seen.advantages_n, recipe.clip_eps_low, recipe.clip_eps_high, recipe.clip_ratio_max
    )
    if recipe.correction == "none":
        return TokenWeights(moved_n * keeps_n, own_n, keeps_n, torch.zeros_like(keeps_n))
    corrected_n = _correct(recipe, importance_n, ratio_n, seen.answers_n)
    factor_n = 1.0 if recipe.proximal == "rollout" else moved_n
    return TokenWeights(corrected_n * factor_n * keeps_n, own_n, keeps_n, corrected_n != ratio_n)


def _split(recipe: Recipe, seen: Seen, own_n: Tensor) -> tuple[Tensor, Tensor]:
    """log importance and what the clip is about, each [n]."""
    if recipe.proximal == "rollout":
        return own_n, own_n
    if recipe.proximal == "loglinear":
        importance_n = loglinear_share(seen.staleness_n) * own_n
    elif seen.proximal_n is None:
        importance_n = own_n
    else:
        importance_n = log_ratio(seen.proximal_n, seen.rollout_logprobs_n)
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
