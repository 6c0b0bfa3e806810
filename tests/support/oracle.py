"""The gradient of an optimizer step, written from the papers and from docs/design/learner.md alone.

It calls none of the learner's mathematics. Each answer has its own forward pass, through transformers' eager attention
in float64. Logits are in memory as a whole. An objective is a loss that autograd differentiates.

    p  the policy that is trained        q  the policy that drew the tokens (the rollout's logprobs)
    b  the base model                    m  the proximal policy
    d  the teacher

Suffixes of names: t = tokens of an answer that are in the loss.
"""

import math
import statistics
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from echo2d.client import Batch, Group, Trajectory
from echo2d.core.protocol.experts import EXPERTS
from echo2d.learner.batch.checks import BatchRules
from echo2d.learner.config import Recipe

Gradient = dict[str, Tensor]  # by the weight's name
MEAN = {
    "grpo": "token",
    "dr_grpo": "constant",
    "gspo": "sequence",
    "cispo": "token",
    "rloo": "token",
    "distill": "token",
}
MASK = {"icepop": (0.5, 5.0), "sequence_mask": (0.5, 2.0)}


class Models(NamedTuple):
    """Causal language models of transformers in float64."""

    policy: Any  # p
    start: Any  # the policy when the train step began
    base: Any  # b
    teacher: Any  # d


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
        if hasattr(model, "given_tlc"):
            model.given_tlc = given_tlc(prompt, self.trajectory)
        logits = (
            model(input_ids=row[None]).logits[0, prompt - 1 : -1] / self.group.sampling.temperature
        )
        logs = logits.log_softmax(-1)[self.places]
        entropy_t = -(logs.exp() * logs).sum(-1)
        return logs.gather(1, row[prompt:][self.places, None])[:, 0], entropy_t


def given_tlc(prompt: int, trajectory: Trajectory) -> Tensor | None:
    """The experts that the engine told, each at the token that was read when it chose them; else -1."""
    if EXPERTS not in trajectory.columns:
        return None
    told = torch.from_numpy(trajectory.columns[EXPERTS].astype(np.int64))
    placed = torch.full_like(told[:1], -1).repeat(prompt + len(told), 1, 1)
    for place, written in enumerate(trajectory.written):
        if written:
            placed[prompt - 1 + place] = told[place]
    return placed


def replaying(model: Any) -> Any:
    """This mixture of Qwen3, whose routers take the experts that were told (R3, arXiv 2510.11370)."""
    model.given_tlc = None
    for place, layer in enumerate(model.model.layers):
        layer.mlp.gate.forward = partial(route, model, place, layer.mlp.gate)
    return model


def route(model: Any, layer: int, gate: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The logits of a layer's router, and the weights and numbers of the experts."""
    logits = hidden.flatten(0, -2) @ gate.weight.T
    shares = logits.softmax(-1)
    chosen = shares.topk(gate.top_k).indices
    if model.given_tlc is not None:
        given = model.given_tlc[:, layer]
        chosen = torch.where(given < 0, chosen, given)
    weights = torch.stack([row[own] for row, own in zip(shares, chosen, strict=True)])
    if gate.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    return logits, weights, chosen


def expected_gradient(
    recipe: Recipe, rules: BatchRules, batch: Batch, groups: Collection[int], models: Models
) -> Gradient:
    """The gradient [by weight] of one optimizer step on these groups of the batch, before it is clipped."""
    answers = [
        answer
        for group, advantages in zip(
            batch.groups, batch_advantages(recipe, rules, batch, models), strict=True
        )
        if group.group_id in groups
        for answer in answers_of(rules, group, batch.step, advantages)
    ]
    if recipe.teacher is not None:
        leads = [float((teacher_t(answer, models) - answer.logq_t).mean()) for answer in answers]
        baseline = recipe.teacher_coef * winsorized_mean(leads)
        answers = [replace(each, advantage=each.advantage - baseline) for each in answers]
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


def winsorized_mean(values: list[float]) -> float:
    """The mean of the values, of which those beyond a quartile count as that quartile."""
    low, _, high = statistics.quantiles(values * (2 // len(values) or 1), n=4, method="inclusive")
    return statistics.mean(min(max(each, low), high) for each in values)


def answers_of(
    rules: BatchRules, group: Group, step: int, advantages: dict[int, float]
) -> list[Answer]:
    """The group's answers that have tokens in the loss."""
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


def batch_advantages(
    recipe: Recipe, rules: BatchRules, batch: Batch, models: Models
) -> list[dict[int, float]]:
    """A of each episode of each group."""
    rewards = [rewards_of(recipe, rules, group, models) for group in batch.groups]
    if recipe.advantage_std != "batch":
        return [advantages_of(recipe, each) for each in rewards]
    centred = [
        {name: reward - sum(each.values()) / len(each) for name, reward in each.items()}
        for each in rewards
    ]
    squares = [value**2 for each in centred for value in each.values()]
    deviation = math.sqrt(sum(squares) / (len(squares) - 1))
    return [{name: value / (deviation + 1e-4) for name, value in each.items()} for each in centred]


def rewards_of(recipe: Recipe, rules: BatchRules, group: Group, models: Models) -> dict[int, float]:
    """The reward of each episode, less its KL to the base if the recipe says so."""
    found: dict[int, float] = {}
    for episode, each in zip(group.episodes, group.trajectories, strict=True):
        found.setdefault(episode, each.reward)
        if recipe.kl_coef and recipe.kl_in == "reward":
            places = torch.tensor([at for span in each.spans for at in range(span.start, span.end)])
            whole = Answer(group, each, (0, 0), 0.0, places, places, places)
            with torch.no_grad():
                logp_t, _ = whole.log_probabilities(models.start)
                logb_t, _ = whole.log_probabilities(models.base)
            found[episode] -= recipe.kl_coef * float(kl_t(recipe, logp_t, logb_t).sum())
    return found


def kl_t(recipe: Recipe, logp_t: Tensor, logb_t: Tensor) -> Tensor:
    """Schulman's estimators of KL(p || b), from a sample of p, for r = b / p."""
    r_t = (logb_t - logp_t).exp()
    return {"k1": -r_t.log(), "k2": 0.5 * r_t.log() ** 2, "k3": (r_t - 1) - r_t.log()}[
        recipe.kl_estimator
    ]


def advantages_of(recipe: Recipe, rewards: dict[int, float]) -> dict[int, float]:
    """A of each episode of a group, from the rewards of its episodes."""
    count, mean = len(rewards), sum(rewards.values()) / len(rewards)
    centred = {name: reward - mean for name, reward in rewards.items()}
    if recipe.objective == "distill":
        return dict.fromkeys(rewards, 0.0)
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
    if not recipe.kl_coef or recipe.kl_in == "reward":
        return found_t
    with torch.no_grad():
        logb_t, _ = answer.log_probabilities(models.base)
    distance_t = kl_t(recipe, logp_t, logb_t)
    if not recipe.kl_weighted:
        return found_t + recipe.kl_coef * distance_t
    weight_t = (logp_t - answer.logq_t).exp()
    if recipe.kl_estimator == "k2":
        # The gradient of k2 itself has the gradient of the KL as its mean under p.
        weight_t = weight_t.detach()
    return found_t + recipe.kl_coef * weight_t * distance_t


def advantage_t(recipe: Recipe, answer: Answer, logp_t: Tensor, models: Models) -> Tensor:
    """A of each token. The gradient of KL(p || d) is the mean of log(p / d) grad log p, so log(d / p) is a reward."""
    found_t = torch.full_like(logp_t, answer.advantage)
    if recipe.teacher is None:
        return found_t
    return found_t + recipe.teacher_coef * (teacher_t(answer, models) - logp_t)


@torch.no_grad()
def teacher_t(answer: Answer, models: Models) -> Tensor:
    """log d of each token."""
    return answer.log_probabilities(models.teacher)[0]


def surrogate_t(recipe: Recipe, answer: Answer, logp_t: Tensor, models: Models) -> Tensor:
    """What the objective maximizes: its ratio times the advantage, clipped, and times a constant weight."""
    reward_t = advantage_t(recipe, answer, logp_t.detach(), models)
    logm_t = log_proximal_t(recipe, answer, logp_t.detach(), models)
    log_ratio_t = logp_t - logm_t
    log_importance_t = (logp_t.detach() if recipe.proximal == "rollout" else logm_t) - answer.logq_t
    if recipe.objective == "gspo":
        mean_t = log_ratio_t.mean().expand_as(logp_t)
        # Advantages of tokens need GSPO-token (arXiv 2507.18071, 4.3), where a token's ratio has the value of its
        # answer's and the gradient of its own.
        log_ratio_t = (
            mean_t if recipe.teacher is None else mean_t.detach() + logp_t - logp_t.detach()
        )
        log_importance_t = log_importance_t.mean().expand_as(logp_t)
    ratio_t = log_ratio_t.exp()
    weight_t = corrected_t(recipe, log_importance_t)
    if recipe.proximal == "rollout":
        # The ratio and the importance are the same number, which counts once.
        weight_t = weight_t / log_importance_t.exp()
    if recipe.correction == "none":
        weight_t = torch.ones_like(weight_t)
    if recipe.objective == "cispo":
        return weight_t * ratio_t.detach() * reward_t * logp_t
    widening_t = torch.ones_like(weight_t)
    if recipe.correction == "adaptive_clip":
        widening_t = (log_importance_t.exp() / recipe.tis_cap).clamp(1.0, recipe.tis_cap)
    return weight_t * clipped_t(recipe, ratio_t, reward_t, widening_t)


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
    if recipe.correction == "sequence_tis":
        return importance_t.prod().clamp(max=recipe.tis_cap).expand_as(importance_t)
    truncated_t = importance_t.clamp(max=recipe.tis_cap)
    if recipe.correction == "sequence_mask":
        return truncated_t * (low <= log_importance_t.mean().exp() <= high)
    return truncated_t


def clipped_t(recipe: Recipe, ratio_t: Tensor, advantage_t: Tensor, widening_t: Tensor) -> Tensor:
    """PPO's clipped surrogate, and for a negative advantage the dual clip's."""
    low, high = (3e-4, 4e-4) if recipe.objective == "gspo" else (0.2, 0.2)
    low, high = recipe.clip_eps_low or low, recipe.clip_eps_high or high
    highest_t = (1 + high) * widening_t
    kept_t = torch.minimum(ratio_t.clamp(min=1 - low), highest_t)
    clipped_t = torch.minimum(ratio_t * advantage_t, kept_t * advantage_t)
    if not recipe.clip_ratio_max:
        return clipped_t
    dual_t = torch.maximum(clipped_t, recipe.clip_ratio_max * advantage_t)
    return torch.where(advantage_t < 0, dual_t, clipped_t)


def gradient_of(model: Any) -> Gradient:
    """A copy of the gradient that the weights of a model have."""
    return {name: weight.grad.clone() for name, weight in model.named_parameters()}


def difference(found: Gradient, expected: Gradient) -> float:
    """The norm of the difference, divided by that of the expected gradient unless this is 0, over all weights."""
    assert found.keys() == expected.keys()
    off = sum(float((found[name] - expected[name]).double().square().sum()) for name in found)
    whole = sum(float(each.double().square().sum()) for each in expected.values())
    return math.sqrt(off / (whole or 1.0))
