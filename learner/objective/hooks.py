"""The operator's own advantages and losses, named `module:function` in the table.

    def advantages(rewards_g): ...    rewards of a group's episodes [g], float32, to advantages [g]
    @whole_batch                      (echo2d.client)
    def advantages(rewards): ...      the same for all groups of a batch: a list of [g] to a list of [g]
    def loss(inputs): ...             a `WeightInputs` to the loss of each token [n], with gradient

The learner multiplies each token's loss by the token's share (`loss_mean`) and sums them. Modules are found like those
of tasks: installed, in run.toml's folder, or in one of run.modules.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from echo2d.client import OperatorFault
from echo2d.learner.config import HABITS, Recipe
from echo2d.learner.objective.objectives import batch_advantages, group_advantages
from echo2d.learner.objective.token_weights import WeightInputs
from echo2d.own_modules import load_own, place_of

# From the rewards [g] of each group of a batch to the advantages [g].
Advantages = Callable[[Sequence[NDArray[np.float32]]], Sequence[NDArray[np.float32]]]
TokenLoss = Callable[[WeightInputs], Tensor]


def advantages_of(recipe: Recipe) -> Advantages:
    """The recipe's function from the rewards of all groups to advantages. OperatorFault: it cannot be imported."""
    if recipe.advantages:
        own = _named("advantages", recipe.advantages)
        return lambda rewards: _own_advantages(recipe.advantages, own, rewards)
    if recipe.advantage_std == "batch":
        return batch_advantages
    baseline, sample_std = HABITS[recipe.objective].baseline, recipe.advantage_std == "sample"
    return lambda rewards: [
        group_advantages(rewards_g, baseline, sample_std=sample_std) for rewards_g in rewards
    ]


def loss_of(recipe: Recipe) -> TokenLoss | None:
    """The run's own loss of each token; None: the objective's. OperatorFault: it cannot be imported."""
    if not recipe.loss:
        return None
    own = _named("loss", recipe.loss)
    return lambda inputs: _checked_loss(recipe.loss, own(inputs), inputs)


def _named(key: str, path: str) -> Callable[[Any], Any]:
    try:
        found = load_own(path)
    except (ImportError, AttributeError, OperatorFault) as error:
        raise OperatorFault(f"learner.{key}: cannot import {path!r}: {error}") from error
    if not callable(found):
        raise OperatorFault(f"learner.{key}: {path!r} is not a function")
    own: Callable[[Any], Any] = found

    @wraps(own)
    def called(given: Any) -> Any:
        try:
            return own(given)
        except Exception as error:
            place, _ = place_of(error)
            raise OperatorFault(
                f"learner.{key}: {path!r}: {type(error).__name__}: {error}"
                + (f" ({place})" if place else "")
            ) from error

    return called


def _own_advantages(
    path: str, own: Callable[[Any], Any], rewards: Sequence[NDArray[np.float32]]
) -> list[NDArray[np.float32]]:
    whole = getattr(own, "whole_batch", False)
    found = own(rewards) if whole else [own(rewards_g) for rewards_g in rewards]
    if not hasattr(found, "__len__") or len(found) != len(rewards):
        expected = f"advantages for each of {len(rewards)} groups"
        raise OperatorFault(f"learner.advantages: {path!r}: expected {expected}; found {found}")
    return [
        _checked_advantages(path, each, rewards_g)
        for each, rewards_g in zip(found, rewards, strict=True)
    ]


def _checked_advantages(
    path: str, found: object, rewards_g: NDArray[np.float32]
) -> NDArray[np.float32]:
    advantages = np.asarray(found, dtype=np.float32)
    if advantages.shape != rewards_g.shape or not np.isfinite(advantages).all():
        expected = f"{len(rewards_g)} finite advantages for {len(rewards_g)} rewards"
        raise OperatorFault(f"learner.advantages: {path!r}: expected {expected}; found {found}")
    return advantages


def _checked_loss(path: str, found: object, inputs: WeightInputs) -> Tensor:
    shape = tuple(inputs.logprobs_n.shape)
    if not isinstance(found, Tensor) or tuple(found.shape) != shape:
        what = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise OperatorFault(
            f"learner.loss: {path!r}: expected a tensor of shape {shape}; found {what}"
        )
    return found
