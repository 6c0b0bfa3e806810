"""Each loss and its gradient, against a loop over targets in float64 that uses only the formulas of the API."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from echo2d.learner.tinker.sums import LOSSES, Targets, WrongCall, given_of, loss_with, targets_of

VOCABULARY = 11
LENGTHS = (5, 1, 9)

Inputs = dict[str, NDArray[Any]]


@dataclass
class Ragged:
    """Logits [t, v] of several datums, and their inputs."""

    logits: list[Tensor]
    inputs: list[Inputs]

    def logprobs(self, datum: int) -> Tensor:
        """Of all tokens [t, v], with gradient."""
        logits = self.logits[datum]
        return logits - logits.exp().sum(dim=1, keepdim=True).log()


def ragged(rng_seed: int, *, targets: int = 1) -> Ragged:
    rng = np.random.default_rng(rng_seed)
    made = Ragged([], [])
    for length in LENGTHS:
        logits = torch.from_numpy(rng.normal(size=(length, VOCABULARY))).requires_grad_()
        shape = (length,) if targets == 1 else (length, targets)
        tokens = rng.integers(0, VOCABULARY, shape)
        right = (
            logits.detach().log_softmax(1).gather(1, torch.from_numpy(tokens).reshape(length, -1))
        )
        made.logits.append(logits)
        made.inputs.append(
            {
                "target_tokens": tokens,
                "weights": rng.normal(size=shape).astype(np.float32),
                "logprobs": (right.numpy().reshape(shape) + rng.normal(size=shape)).astype(
                    np.float32
                ),
                "advantages": rng.normal(size=shape).astype(np.float32),
                "sequence_ratio_mask": (rng.random(shape) < 0.6).astype(np.float32),
            }
        )
    return made


def ours(name: str, config: Mapping[str, float], data: Ragged) -> Tensor:
    loss = loss_with(name, config)
    logprobs, given, datums = [], [], []
    for index, inputs in enumerate(data.inputs):
        targets = targets_of(inputs, LENGTHS[index], VOCABULARY)
        found = data.logprobs(index).gather(1, torch.from_numpy(targets).reshape(len(targets), -1))
        logprobs.append(found.flatten())
        given.append(given_of(loss, inputs, targets.shape))
        datums.append(torch.full((targets.size,), index))
    joined = {
        name: torch.from_numpy(np.concatenate([each[name] for each in given])).double()
        for name in given[0]
    }
    return loss.of_targets(Targets(torch.cat(logprobs), joined, torch.cat(datums))).sum()


# --- the oracle: lp, q and A are numbers; `lp` carries the gradient


def clip(ratio: Tensor, low: float, high: float) -> Tensor:
    if ratio.item() < low:
        return torch.tensor(low, dtype=torch.float64)
    return torch.tensor(high, dtype=torch.float64) if ratio.item() > high else ratio


def surrogate(ratio: Tensor, advantage: float, low: float, high: float) -> Tensor:
    plain, clipped = ratio * advantage, clip(ratio, low, high) * advantage
    return -(plain if plain.item() <= clipped.item() else clipped)


def importance_sampling(lp: Tensor, q: float, a: float) -> Tensor:
    return -torch.exp(lp - q) * a


def ppo(lp: Tensor, q: float, a: float, low: float = 0.8, high: float = 1.2) -> Tensor:
    return surrogate(torch.exp(lp - q), a, low, high)


def cispo(lp: Tensor, q: float, a: float, low: float = 0.0, high: float = 4.0) -> Tensor:
    return -clip(torch.exp(lp - q), low, high).item() * a * lp


def dro(lp: Tensor, q: float, a: float, beta: float = 0.05) -> Tensor:
    return 0.0 * lp if q == 0 and a == 0 else -(lp * a - beta / 2 * (lp - q) ** 2)


def stable_reinforce(lp: Tensor, q: float, a: float, cap: float = 2.0) -> Tensor:
    return -min(math.exp(lp.item() - q), cap) * a * lp


Each = Callable[..., Tensor]


def expected(each: Each, data: Ragged, *settings: float) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for index, inputs in enumerate(data.inputs):
        everything = data.logprobs(index)
        for t, token in enumerate(inputs["target_tokens"]):
            q, a = float(inputs["logprobs"][t]), float(inputs["advantages"][t])
            total = total + each(everything[t, token], q, a, *settings)
    return total


def cross_entropy(data: Ragged) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for index, inputs in enumerate(data.inputs):
        everything = data.logprobs(index)
        for t, tokens in enumerate(inputs["target_tokens"]):
            for token, w in zip(np.ravel(tokens), np.ravel(inputs["weights"][t]), strict=True):
                total = total - float(w) * everything[t, token]
    return total


def gspo(data: Ragged, low: float = 0.9997, high: float = 1.0004) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for index, inputs in enumerate(data.inputs):
        everything, tokens = data.logprobs(index), inputs["target_tokens"]
        counted = [t for t, mask in enumerate(inputs["sequence_ratio_mask"]) if mask]
        ratios = [everything[t, tokens[t]].item() - float(inputs["logprobs"][t]) for t in counted]
        mean = math.exp(sum(ratios) / len(ratios)) if ratios else 1.0
        for t, token in enumerate(tokens):
            # The ratio's value is the datum's, and its gradient is the value times that of log p.
            lp = everything[t, token]
            ratio = mean * (lp - lp.item() + 1.0)
            total = total + surrogate(ratio, float(inputs["advantages"][t]), low, high)
    return total


def same(data: Ragged, found: Tensor, right: Tensor) -> None:
    slopes = [
        torch.autograd.grad(value, data.logits, materialize_grads=True) for value in (found, right)
    ]
    torch.testing.assert_close(found, right, rtol=1e-6, atol=1e-9)
    for mine, its in zip(*slopes, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("rng_seed", range(5))
@pytest.mark.parametrize("targets", [1, 4])
def test_cross_entropy(rng_seed: int, targets: int) -> None:
    data = ragged(rng_seed, targets=targets)
    same(data, ours("cross_entropy", {}, data), cross_entropy(data))


@pytest.mark.parametrize("rng_seed", range(5))
@pytest.mark.parametrize(
    ("name", "each", "config"),
    [
        ("importance_sampling", importance_sampling, {}),
        ("ppo", ppo, {}),
        ("ppo", ppo, {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5}),
        ("cispo", cispo, {}),
        ("cispo", cispo, {"clip_low_threshold": 0.7, "clip_high_threshold": 1.1}),
        ("dro", dro, {}),
        ("dro", dro, {"beta": 0.7}),
        ("stable_reinforce", stable_reinforce, {}),
        ("stable_reinforce", stable_reinforce, {"ratio_cap": 1.1}),
    ],
)
def test_a_loss_of_one_target(
    rng_seed: int, name: str, each: Each, config: Mapping[str, float]
) -> None:
    data = ragged(rng_seed)
    same(data, ours(name, config, data), expected(each, data, *config.values()))


@pytest.mark.parametrize("rng_seed", range(5))
@pytest.mark.parametrize("bounds", [(), (0.5, 1.5)])
def test_gspo(rng_seed: int, bounds: Sequence[float]) -> None:
    data = ragged(rng_seed)
    data.inputs[1]["sequence_ratio_mask"][:] = 0.0
    config = dict(zip(("clip_low_threshold", "clip_high_threshold"), bounds, strict=False))
    same(data, ours("gspo", config, data), gspo(data, *bounds))


def test_bounds_of_each_target_count_instead_of_the_setting() -> None:
    data = ragged(0)
    for inputs in data.inputs:
        inputs["clip_high_threshold"] = np.full(inputs["target_tokens"].shape, 1.01, np.float32)
    config = {"clip_low_threshold": 0.95, "clip_high_threshold": 9.0}
    same(data, ours("ppo", config, data), expected(ppo, data, 0.95, float(np.float32(1.01))))


def test_dro_masks_a_prompt_of_zeros() -> None:
    data = ragged(0)
    for inputs in data.inputs:
        inputs["logprobs"][0] = inputs["advantages"][0] = 0.0
    found = ours("dro", {}, data)
    same(data, found, expected(dro, data))
    slopes = torch.autograd.grad(ours("dro", {}, data), data.logits)
    assert all(not slope[0].any() for slope in slopes)


def test_a_ratio_that_float32_cannot_hold_leaves_the_loss_finite() -> None:
    data = ragged(0)
    data.inputs[0]["logprobs"][0] = -300.0
    data.inputs[0]["advantages"][0] = 0.0
    for name in set(LOSSES) - {"cross_entropy"}:
        assert torch.isfinite(ours(name, {}, data).float()), name


@pytest.mark.parametrize(
    ("name", "config", "line"),
    [
        ("reinforce", {}, "loss_fn: expected one of cross_entropy, .*; found 'reinforce'"),
        ("cross_entropy", {"beta": 1.0}, "cross_entropy: expected no setting; found 'beta'"),
        ("ppo", {"clip": 1.0}, "ppo: expected one of clip_low_threshold, .*; found 'clip'"),
        ("dro", {"beta": "high"}, "beta: expected a number; found 'high'"),
        ("dro", {"beta": math.nan}, "beta: expected a number; found 'nan'"),
        ("stable_reinforce", {"kl_coeff": 0.1}, "kl_coeff: expected 0, .*; found 0.1"),
    ],
)
def test_a_wrong_loss_or_setting_is_refused(
    name: str, config: Mapping[str, object], line: str
) -> None:
    with pytest.raises(WrongCall, match=line):
        loss_with(name, config)


@pytest.mark.parametrize(
    ("targets", "line"),
    [
        (None, "target_tokens: expected 3 tokens; found no such input"),
        (
            np.zeros(2, np.int64),
            r"expected integers of the shape \(3,\) or .*; found int64 of \(2,\)",
        ),
        (np.zeros((3, 0), np.int64), r"found int64 of \(3, 0\)"),
        (np.zeros(3, np.float32), "found float32"),
        (np.array([0, 11, 0]), "target_tokens: expected tokens from 0 to 10; found 11"),
        (np.array([0, -1, 0]), "target_tokens: expected tokens from 0 to 10; found -1"),
    ],
)
def test_wrong_targets_are_refused(targets: NDArray[Any] | None, line: str) -> None:
    with pytest.raises(WrongCall, match=line):
        targets_of({} if targets is None else {"target_tokens": targets}, 3, VOCABULARY)


@pytest.mark.parametrize(
    ("name", "inputs", "shape", "line"),
    [
        ("ppo", {}, (3,), r"logprobs: expected an input of the shape \(3,\); found no such input"),
        ("cross_entropy", {"weights": np.ones(4)}, (3,), r"weights: expected the shape of .*; found \(4,\)"),
        ("cross_entropy", {"weights": np.ones(3)}, (3, 2), r"\(3, 2\); found \(3,\)"),
        ("cross_entropy", {"weights": np.array([1, np.nan])}, (2,), "weights: expected finite numbers"),
        ("dro", {}, (3, 2), "target_tokens: expected one target for each token; found 2"),
        (
            "ppo",
            {"logprobs": np.ones(2), "advantages": np.ones(2), "clip_low_threshold": np.ones(3)},
            (2,),
            "clip_low_threshold: expected the shape of",
        ),
    ],
)  # fmt: skip
def test_wrong_inputs_are_refused(
    name: str, inputs: Inputs, shape: tuple[int, ...], line: str
) -> None:
    with pytest.raises(WrongCall, match=line):
        given_of(loss_with(name, {}), inputs, shape)


def test_whole_numbers_are_weights_too() -> None:
    given = given_of(LOSSES["cross_entropy"], {"weights": np.array([0, 1])}, (2,))
    assert given["weights"].dtype == np.float32
