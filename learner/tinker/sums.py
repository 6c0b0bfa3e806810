"""The losses of the Tinker API. A call's loss is the sum of these over all targets of all its datums: nothing is
averaged, and nothing is masked besides what a loss says here.

    p   the model's probability of a target     A   `advantages`          r    p / q, at most e^20 and at least e^-20
    q   that in `logprobs`                      w   `weights`             sg   its gradient is zero

| loss | of a target | settings |
| --- | --- | --- |
| cross_entropy | -w log p | |
| importance_sampling | -r A | |
| ppo | -min(r A, clip(r) A) | bounds of the ratio: 0.8, 1.2 |
| cispo | -sg(clip(r)) A log p | bounds of the ratio: 0, 4 |
| dro | -(A log p - beta / 2 log(r)^2) | beta: 0.05 |
| gspo | as ppo, with the ratio of the whole datum | bounds of the ratio: 0.9997, 1.0004 |
| stable_reinforce | -sg(min(r, cap)) A log p | ratio_cap: 2 |

The bounds are the settings `clip_low_threshold` and `clip_high_threshold`. An input of the same name gives each target
its own. The bounds of gspo are those of its paper (arXiv 2507.18071), because the API names none.

Only cross_entropy takes several targets for each token. Inputs that a loss does not name are ignored.

Suffixes of names: n = targets of all datums, one datum after the other.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echo2d.learner.objective.objectives import LOG_RATIO_MAX, answer_means

LOW, HIGH = "clip_low_threshold", "clip_high_threshold"
TARGETS = "target_tokens"
KL = "kl_coeff"


class WrongCall(ValueError):  # noqa: N818 - it is the client's error
    """A client's call cannot be computed. Its text is one line that says why."""


@dataclass(frozen=True, slots=True)
class Targets:
    """The targets of several datums."""

    logprobs_n: Tensor  # with gradient
    given: Mapping[str, Tensor]  # the inputs and settings of the loss, by name, each [n]
    datums_n: Tensor  # the index of each target's datum, ascending

    @property
    def log_ratio_n(self) -> Tensor:
        return (self.logprobs_n - self.given["logprobs"]).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)

    def clipped(self, ratio_n: Tensor) -> Tensor:
        return ratio_n.clamp(self.given[LOW], self.given[HIGH])


def cross_entropy(targets: Targets) -> Tensor:
    """Weights may have either sign."""
    return -targets.given["weights"] * targets.logprobs_n


def importance_sampling(targets: Targets) -> Tensor:
    return -targets.log_ratio_n.exp() * targets.given["advantages"]


def ppo(targets: Targets) -> Tensor:
    return _clipped_surrogate(targets, targets.log_ratio_n.exp())


def cispo(targets: Targets) -> Tensor:
    factor_n = targets.clipped(targets.log_ratio_n.exp()).detach()
    return -factor_n * targets.given["advantages"] * targets.logprobs_n


def dro(targets: Targets) -> Tensor:
    """Targets with A = 0 and log q = 0 are masked: clients put these two zeros on prompts, and the second term would
    punish the model for every prompt.
    """
    advantages_n, beta_n = targets.given["advantages"], targets.given["beta"]
    kept_n = (advantages_n != 0) | (targets.given["logprobs"] != 0)
    # Not clamped: the pull towards q grows with the distance.
    distance_n = targets.logprobs_n - targets.given["logprobs"]
    gain_n = advantages_n * targets.logprobs_n - beta_n / 2 * distance_n.square()
    return -torch.where(kept_n, gain_n, 0.0)


def gspo(targets: Targets) -> Tensor:
    """Every target has the ratio of its datum: e to the mean of log r over `sequence_ratio_mask`. Its gradient is that
    of the target's own log p (the token form of GSPO).
    """
    mask_n = targets.given["sequence_ratio_mask"]
    log_ratio_n = targets.log_ratio_n.detach()
    counts_n = answer_means(mask_n, targets.datums_n, "sum")
    sums_n = answer_means(mask_n * log_ratio_n, targets.datums_n, "sum")
    means_n = sums_n / torch.where(counts_n == 0, 1.0, counts_n)
    own_n = targets.logprobs_n - targets.logprobs_n.detach()
    return _clipped_surrogate(targets, (means_n + own_n).exp())


def stable_reinforce(targets: Targets) -> Tensor:
    """REINFORCE with truncated importance sampling, the learner's correction `tis`. The API has a loss of this name
    whose formula is not public, so this is not that loss, and its setting `kl_coeff` must be 0.
    """
    factor_n = targets.log_ratio_n.exp().minimum(targets.given["ratio_cap"]).detach()
    return -factor_n * targets.given["advantages"] * targets.logprobs_n


def _clipped_surrogate(targets: Targets, ratio_n: Tensor) -> Tensor:
    advantages_n = targets.given["advantages"]
    return -torch.minimum(ratio_n * advantages_n, targets.clipped(ratio_n) * advantages_n)


class Loss(NamedTuple):
    """A loss, the inputs that it needs besides `target_tokens`, and the defaults of its settings."""

    of_targets: Callable[[Targets], Tensor]  # [n], with gradient
    inputs: tuple[str, ...] = ("logprobs", "advantages")
    settings: Mapping[str, float] = MappingProxyType({})


LOSSES: Mapping[str, Loss] = {
    "cross_entropy": Loss(cross_entropy, ("weights",)),
    "importance_sampling": Loss(importance_sampling),
    "ppo": Loss(ppo, settings={LOW: 0.8, HIGH: 1.2}),
    "cispo": Loss(cispo, settings={LOW: 0.0, HIGH: 4.0}),
    "dro": Loss(dro, settings={"beta": 0.05}),
    "gspo": Loss(
        gspo, ("logprobs", "advantages", "sequence_ratio_mask"), {LOW: 0.9997, HIGH: 1.0004}
    ),
    "stable_reinforce": Loss(stable_reinforce, settings={"ratio_cap": 2.0, KL: 0.0}),
}


def loss_with(name: str, config: Mapping[str, object]) -> Loss:
    """The loss of this name, with these settings instead of its defaults. WrongCall: there is no such loss or setting,
    or a setting is no number.
    """
    if name not in LOSSES:
        raise WrongCall(f"loss_fn: expected one of {', '.join(LOSSES)}; found {name[:40]!r}")
    known = LOSSES[name].settings
    for key, value in config.items():
        if key not in known:
            expected = f"one of {', '.join(known)}" if known else "no setting"
            raise WrongCall(f"loss_fn_config: {name}: expected {expected}; found {key[:40]!r}")
        if not isinstance(value, int | float) or math.isnan(value):
            raise WrongCall(f"loss_fn_config: {key}: expected a number; found {str(value)[:40]!r}")
        if key == KL and value:
            raise WrongCall(
                f"loss_fn_config: {key}: expected 0, its formula is not public; found {value}"
            )
    return Loss(LOSSES[name].of_targets, LOSSES[name].inputs, {**known, **config})  # type: ignore[dict-item]


def targets_of(
    inputs: Mapping[str, NDArray[Any]], tokens: int, vocabulary: int
) -> NDArray[np.int64]:
    """The targets of a datum of this many tokens, [tokens] or [tokens, k]. WrongCall: they are missing, have another
    shape, or are not in the vocabulary.
    """
    if TARGETS not in inputs:
        raise WrongCall(f"{TARGETS}: expected {tokens} tokens; found no such input")
    found = inputs[TARGETS]
    fits = found.ndim in (1, 2) and len(found) == tokens and found.size
    if found.dtype.kind not in "iu" or not fits:
        raise WrongCall(
            f"{TARGETS}: expected integers of the shape ({tokens},) or ({tokens}, k), for {tokens} tokens; found "
            f"{found.dtype} of {found.shape}"
        )
    check_tokens(TARGETS, found, vocabulary)
    return found.astype(np.int64)


def check_tokens(name: str, tokens: NDArray[Any], vocabulary: int) -> None:
    """WrongCall: a token is not in the vocabulary."""
    wrong = tokens[(tokens < 0) | (tokens >= vocabulary)]
    if wrong.size:
        raise WrongCall(f"{name}: expected tokens from 0 to {vocabulary - 1}; found {wrong[0]}")


def given_of(
    loss: Loss, inputs: Mapping[str, NDArray[Any]], shape: tuple[int, ...]
) -> dict[str, NDArray[np.float32]]:
    """The inputs and settings of the loss for each target of a datum, by name, each [n]. shape: of its targets.

    WrongCall: an input is missing, has another shape, or has a number that is not finite.
    """
    if len(shape) > 1 and "weights" not in loss.inputs:
        raise WrongCall(f"{TARGETS}: expected one target for each token; found {shape[1]}")
    own = [name for name in (LOW, HIGH) if name in loss.settings and name in inputs]
    given = {
        name: np.full(math.prod(shape), value, dtype=np.float32)
        for name, value in loss.settings.items()
    }
    for name in (*loss.inputs, *own):
        if name not in inputs:
            raise WrongCall(f"{name}: expected an input of the shape {shape}; found no such input")
        found = inputs[name]
        if found.shape != shape:
            raise WrongCall(
                f"{name}: expected the shape of {TARGETS}, {shape}; found {found.shape}"
            )
        given[name] = found.astype(np.float32).reshape(-1)
        if not np.isfinite(given[name]).all():
            raise WrongCall(f"{name}: expected finite numbers; found NaN or infinity")
    return given
