"""Models that cannot be loaded, and rows that several answers share."""

import dataclasses
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from echo2d.client import OperatorFault
from learner.batch.packing import PackedAnswer, micro_batches
from learner.config import LearnerConfig
from learner.model.policy import answer_logprobs, keeps_answers_apart, load_model, shares_prompts
from tests.support.learner import learn
from tests.support.scripted_coordinator import ScriptedCoordinator


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_an_incomplete_model_is_the_operators_fault(
    config: LearnerConfig, coordinator: ScriptedCoordinator, tmp_path: Path, name: str
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for path in config.model.iterdir():
        if path.name != name:
            (model / path.name).hardlink_to(path)
    with pytest.raises(OperatorFault, match=r"learner\.model"):
        learn(dataclasses.replace(config, model=model), coordinator)


def test_a_model_without_one_of_its_weights_is_the_operators_fault(
    config: LearnerConfig, tmp_path: Path
) -> None:
    model = shutil.copytree(config.model, tmp_path / "lacking")
    tensors = load_file(model / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(OperatorFault, match=r"lacking lacks the weights model\.norm\.weight"):
        load_model(model)


def test_a_truncated_model_is_the_operators_fault(
    config: LearnerConfig, coordinator: ScriptedCoordinator, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(config.model, model)
    os.truncate(model / "model.safetensors", 5000)
    with pytest.raises(OperatorFault, match=r"learner\.model: cannot load"):
        learn(dataclasses.replace(config, model=model), coordinator)


def test_rows_shared_by_several_answers_give_the_same_logprobs(base: Path) -> None:
    model = load_model(base).eval()
    assert keeps_answers_apart(model)
    rng = np.random.default_rng(0)
    answers = [
        PackedAnswer(
            0,
            index,
            rng.integers(0, 17, length, dtype=np.int32),
            np.arange(length) > 2,
            np.zeros(length - 3, dtype=np.float32),
            np.zeros(length - 3, dtype=np.int64),
            np.float32(index),
        )
        for index, length in enumerate((20, 4, 9, 7, 12, 5))
    ]
    found = []
    for packed in (False, True):
        (micro,) = micro_batches(answers, 1000, packed=packed)
        with torch.inference_mode():
            logprobs = answer_logprobs(
                model, micro.tokens_bt, micro.answer_bt, 1.0, micro.positions_bt
            )
        found.append({index: logprobs[micro.advantages_n == index] for index in range(6)})
    assert all(torch.allclose(found[0][index], found[1][index], atol=1e-5) for index in range(6))


def test_answers_behind_one_prompt_have_the_same_logprobs_and_gradients(base: Path) -> None:
    model = load_model(base).eval()
    assert shares_prompts(model)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 17, 7, dtype=np.int32) for _ in range(2)]
    answers = [
        PackedAnswer(
            index % 2,
            index,
            np.concatenate([prompts[index % 2], rng.integers(0, 17, length, dtype=np.int32)]),
            np.arange(7 + length) >= 7,
            np.zeros(length, dtype=np.float32),
            np.zeros(length, dtype=np.int64),
            np.float32(index),
            prompt=7,
        )
        for index, length in enumerate((9, 4, 1, 7, 12, 5))
    ]
    found, gradients = [], []
    for shared in (False, True):
        (micro,) = micro_batches(answers, 1000, packed=True, shared=shared)
        assert (micro.shared is not None) == shared
        logprobs = answer_logprobs(
            model, micro.tokens_bt, micro.answer_bt, 1.0, micro.positions_bt, micro.shared
        )
        found.append({index: logprobs[micro.advantages_n == index] for index in range(6)})
        model.zero_grad()
        torch.autograd.backward(logprobs.sum())
        gradients.append([weight.grad for weight in model.parameters()])
    assert all(torch.allclose(found[0][index], found[1][index], atol=1e-5) for index in range(6))
    for apart, together in zip(*gradients, strict=True):
        assert apart is not None
        assert together is not None
        assert torch.allclose(apart, together, atol=1e-4)


def test_a_model_with_a_window_has_no_mask_of_ours(base: Path) -> None:
    model = load_model(base)
    model.config.sliding_window = 4
    assert not shares_prompts(model)
    model.config.sliding_window = None
    model.config.layer_types = ["full_attention", "sliding_attention"]
    assert not shares_prompts(model)
