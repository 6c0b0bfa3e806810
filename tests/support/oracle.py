"""The gradient of an optimizer step, written from the papers and from docs/design/learner.md alone.

It calls none of the learner's mathematics. Each answer has its own forward pass, through transformers' eager attention
in float64. Logits are in memory as a whole. An objective is a loss that autograd differentiates.

    p  the policy that is trained        q  the policy that drew the tokens (the rollout's logprobs)
    b  the base model                    m  the proximal policy

Suffixes of names: t = tokens of an answer that are in the loss.
"""

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from echo2d.client import Batch, Group, Trajectory
from echo2d.learner.batch.checks import BatchRules
from echo2d.learner.config import Recipe

Gradient = dict[str, Tensor]  # by the weight's name
MEAN = {
    "grpo": "token",
    "dr_grpo": "constant",
    "gspo": "sequence",
    "cispo": "token",
    "rloo": "token",
}
MASK = {"icepop": (0.5, 5.0), "sequence_mask": (0.5, 2.0)}


class Models(NamedTuple):
    """Causal language models of transformers in float64."""

    policy: Any  # p
    start: Any  # the policy when the train step began
    base: Any  # b


@dataclass(frozen=True, slots=True)
class Answer:
    """One trajectory, or one branch of an episode."""

    group: Group
    trajectory: Trajectory
    episode: tuple[int, int]
    advantage: float
    places: Tensor  # [t], of the tokens in the loss, among the output tokens
    staleness_t: Tensor
    logq_t: Tensor

    def log_probabilities(self, model: Any) -> tuple[Tensor, Tensor]:
        """log p [t] and the entropy [t] of the distributions that the tokens were drawn from."""
        row = torch.from_numpy(np.concatenate([self.group.prompt, self.trajectory.tokens])).long()
        prompt = len(self.group.prompt)
        logits = (
            model(input_ids=row[None]).logits[0, prompt - 1 : -1] / self.group.sampling.temperature
        )
        logs = logits.log_softmax(-1)[self.places]
        entropy_t = -(logs.exp() * logs).sum(-1)
        return logs.gather(1, row[prompt:][self.places, None])[:, 0], entropy_t


def expected_gradient(
    recipe: Recipe, rules: BatchRules, batch: Batch, groups: Collection[int], models: Models
) -> Gradient:
    """The gradient [by weight] of one optimizer step on these groups of the batch, before it is clipped."""
    answers = [
        answer
        for group in batch.groups
        if group.group_id in groups
        for answer in answers_of(recipe, rules, group, batch.step)
    ]
    lengths = Counter[tuple[int, int]]()  # tokens in the loss, by episode
    for answer in answers:
        lengths[answer.episode] += len(answer.places)
    mean = MEAN[recipe.objective] if recipe.loss_mean == "auto" else recipe.loss_mean
    for answer in answers:
        divisor = {
            "token": lengths.total(),
            "sequence": len(lengths) * lengths[answer.episode],
            "constant": len(lengths) * recipe.loss_tokens,
        }[mean]
        torch.autograd.backward(loss_t(recipe, answer, models).sum() / divisor)
    found = gradient_of(models.policy)
    models.policy.zero_grad()
    return found


def answers_of(recipe: Recipe, rules: BatchRules, group: Group, step: int) -> list[Answer]:
    """The group's answers that have tokens in the loss."""
    rewards = {
        name: each.reward for name, each in zip(group.episodes, group.trajectories, strict=True)
    }
    advantages = advantages_of(recipe, rewards)
    found = []
    for episode, each in zip(group.episodes, group.trajectories, strict=True):
        ages = {
            place: step - 1 - span.version
            for span in each.spans
            for place in range(span.start, span.end)
        }
        kept = [place for place, age in sorted(ages.items()) if age <= rules.staleness_max]
        if kept and (rules.trains_cut or each.finish == "stop"):
            found.append(
                Answer(
                    group,
                    each,
                    (group.group_id, episode),
                    advantages[episode],
                    torch.tensor(kept),
                    torch.tensor([ages[place] for place in kept]),
                    torch.from_numpy(each.logprobs.astype(np.float64))[kept],
                )
            )
    return found


def advantages_of(recipe: Recipe, rewards: dict[int, float]) -> dict[int, float]:
    """A of each episode of a group, from the rewards of its episodes."""
    count, mean = len(rewards), sum(rewards.values()) / len(rewards)
    centred = {name: reward - mean for name, reward in rewards.items()}
    if count == 1 or recipe.objective == "dr_grpo":
        return centred
    if recipe.objective == "rloo":
        return {
            name: rewards[name] - (count * mean - rewards[name]) / (count - 1) for name in rewards
        }
    divisor = count - 1 if recipe.advantage_std == "sample" else count
    deviation = math.sqrt(sum(each**2 for each in centred.values()) / divisor)
    return {name: each / (deviation + 1e-4) for name, each in centred.items()}


def loss_t(recipe: Recipe, answer: Answer, models: Models) -> Tensor:
    """The loss of each token, of which the step's loss is a weighted sum."""
    logp_t, entropy_t = answer.log_probabilities(models.policy)
    found_t = -surrogate_t(recipe, answer, logp_t, models) - recipe.entropy_coef * entropy_t
    if not recipe.kl_coef:
        return found_t
    with torch.no_grad():
        logb_t, _ = answer.log_probabilities(models.base)
    distance_t = (logb_t - logp_t).exp() - (logb_t - logp_t) - 1
    weight_t = (logp_t - answer.logq_t).exp() if recipe.kl_weighted else 1.0
    return found_t + recipe.kl_coef * weight_t * distance_t


def surrogate_t(recipe: Recipe, answer: Answer, logp_t: Tensor, models: Models) -> Tensor:
    """What the objective maximizes: its ratio times the advantage, clipped, and times a constant weight."""
    logm_t = log_proximal_t(recipe, answer, logp_t.detach(), models)
    log_ratio_t = logp_t - logm_t
    log_importance_t = (logp_t.detach() if recipe.proximal == "rollout" else logm_t) - answer.logq_t
    if recipe.objective == "gspo":
        log_ratio_t = log_ratio_t.mean().expand_as(logp_t)
        log_importance_t = log_importance_t.mean().expand_as(logp_t)
    ratio_t = log_ratio_t.exp()
    weight_t = corrected_t(recipe, log_importance_t)
    if recipe.proximal == "rollout":
        # The ratio and the importance are the same number, which counts once.
        weight_t = weight_t / log_importance_t.exp()
    if recipe.correction == "none":
        weight_t = torch.ones_like(weight_t)
    if recipe.objective == "cispo":
        return weight_t * ratio_t.detach() * answer.advantage * logp_t
    return weight_t * clipped_t(recipe, ratio_t, answer.advantage)


def log_proximal_t(recipe: Recipe, answer: Answer, logp_t: Tensor, models: Models) -> Tensor:
    """log m of each token, without gradient."""
    if recipe.proximal == "rollout":
        return answer.logq_t
    if recipe.proximal == "loglinear":
        return (answer.logq_t + answer.staleness_t * logp_t) / (answer.staleness_t + 1)
    with torch.no_grad():
        return answer.log_probabilities(models.start)[0]


def corrected_t(recipe: Recipe, log_importance_t: Tensor) -> Tensor:
    """The importance of each token after the correction."""
    importance_t = log_importance_t.exp()
    low, high = MASK.get(recipe.correction, (0.0, 0.0))
    low, high = recipe.mask_low or low, recipe.mask_high or high
    if recipe.correction == "icepop":
        return importance_t * ((importance_t >= low) & (importance_t <= high))
    truncated_t = importance_t.clamp(max=recipe.tis_cap)
    if recipe.correction == "sequence_mask":
        return truncated_t * (low <= log_importance_t.mean().exp() <= high)
    return truncated_t


def clipped_t(recipe: Recipe, ratio_t: Tensor, advantage: float) -> Tensor:
    """PPO's clipped surrogate, and for a negative advantage the dual clip's."""
    low, high = (3e-4, 4e-4) if recipe.objective == "gspo" else (0.2, 0.2)
    low, high = recipe.clip_eps_low or low, recipe.clip_eps_high or high
    clipped_t = torch.minimum(ratio_t * advantage, ratio_t.clamp(1 - low, 1 + high) * advantage)
    if advantage < 0 and recipe.clip_ratio_max:
        return clipped_t.clamp(min=recipe.clip_ratio_max * advantage)
    return clipped_t


def gradient_of(model: Any) -> Gradient:
    """A copy of the gradient that the weights of a model have."""
    return {name: weight.grad.clone() for name, weight in model.named_parameters()}


def difference(found: Gradient, expected: Gradient) -> float:
    """The norm of the difference, divided by that of the expected gradient unless this is 0, over all weights."""
    assert found.keys() == expected.keys()
    off = sum(float((found[name] - expected[name]).double().square().sum()) for name in found)
    whole = sum(float(each.double().square().sum()) for each in expected.values())
    return math.sqrt(off / (whole or 1.0))
