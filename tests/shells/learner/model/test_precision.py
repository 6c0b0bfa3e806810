"""Layers in bfloat16 over float32 weights: close to float32, and no update is too small for them."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from echo2d.learner.batch.packing import PackedAnswer
from echo2d.learner.config import LearnerConfig
from echo2d.learner.model.policy import Policy
from echo2d.learner.ranks.ranks import Ranks, whole

PROMPT, LENGTH, ANSWERS, VOCABULARY = 3, 24, 32, 17


def answers() -> list[PackedAnswer]:
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, VOCABULARY, (ANSWERS // 8, PROMPT), dtype=np.int32)
    return [
        PackedAnswer(
            group_id=number // 8,
            sample=number % 8,
            tokens=np.concatenate(
                [prompts[number // 8], rng.integers(0, VOCABULARY, LENGTH, dtype=np.int32)]
            ),
            counts=np.arange(PROMPT + LENGTH) >= PROMPT,
            logprobs_n=np.full(LENGTH, -2.0, dtype=np.float32),
            staleness_n=np.zeros(LENGTH, dtype=np.int64),
            advantage=np.float32(rng.normal()),
            temperature=0.8,
            prompt=PROMPT,
        )
        for number in range(ANSWERS)
    ]


def policy(config: LearnerConfig, dtype: Any, **changes: Any) -> Policy:
    return Policy(dataclasses.replace(config, dtype=dtype, correction="none", **changes), Ranks())


def scored(made: Policy) -> tuple[Tensor, Tensor]:
    """log p of all tokens, and the whole gradient, as vectors."""
    (part,) = made.lay_out([answers()])
    (micro,) = part.micro
    logprobs_n = made._scorer(micro).logprobs_n.detach()
    made._gradient(part, 2, {})
    slopes = [whole(weight.grad) for weight in made.model.parameters() if weight.grad is not None]
    return logprobs_n, torch.cat([slope.flatten() for slope in slopes])


def test_a_pass_in_bfloat16_is_close_to_float32(config: LearnerConfig) -> None:
    (narrow, narrow_slope), (wide, wide_slope) = (
        scored(policy(config, dtype)) for dtype in ("bfloat16", "float32")
    )
    assert narrow.dtype == narrow_slope.dtype == torch.float32
    difference = float((narrow - wide).abs().mean())
    cosine = float(torch.cosine_similarity(narrow_slope, wide_slope, dim=0))
    print(f"mean difference of log p {difference:.5f}, cosine of the gradients {cosine:.5f}")  # noqa: T201
    assert 0.0 < difference <= 0.01
    assert cosine >= 0.995


def test_the_weights_keep_updates_that_bfloat16_would_lose(config: LearnerConfig) -> None:
    """One step of AdamW changes each weight by lr: a thousandth of what bfloat16 can tell apart near 0.1."""
    made = policy(config, "bfloat16", lr=1e-7, warmup_steps=0)
    before = {name: whole(weight).clone() for name, weight in made.weights().items()}
    assert {weight.dtype for weight in before.values()} == {torch.float32}
    made.train_step(1, made.lay_out([answers()]), 2)
    old, new = (
        torch.cat([whole(weight).flatten() for weight in weights.values()])
        for weights in (before, made.weights())
    )
    assert float((new != old).float().mean()) > 0.9
    assert float((new.bfloat16() == old.bfloat16()).float().mean()) > 0.9


def test_lora_and_checkpointing_train_in_bfloat16(config: LearnerConfig) -> None:
    taught = {"teacher": config.model, "objective": "distill"}
    for changes in ({"lora_rank": 2}, {"recompute": "all"}, {"kl_coef": 0.1}, taught):
        made = policy(config, "bfloat16", **changes)
        report = made.train_step(1, made.lay_out([answers()]), 2)
        assert 0 < report.grad_norm < 1e3


@pytest.mark.parametrize(
    ("dtype", "cuda", "expected"),
    [
        ("auto", False, "float32"),
        ("auto", True, "bfloat16"),
        ("float32", True, "float32"),
        ("bfloat16", False, "bfloat16"),
    ],
)
def test_the_device_decides_the_dtype_unless_it_is_chosen(
    config: LearnerConfig, dtype: Any, cuda: bool, expected: str
) -> None:
    assert dataclasses.replace(config, dtype=dtype).explicit(cuda=cuda).dtype == expected
