"""The learner that trains an adapter beside a frozen base, with a real model and a scripted coordinator."""

import dataclasses
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import load_file

from echo2d.adapters import base_digest, pinned_base
from echo2d.client import Coordinator, OperatorFault
from echo2d.demo.tiny_model import TinyRecipe, make_tiny_model
from echo2d.learner.batch.prefetch import BatchPrefetch
from echo2d.learner.config import LearnerConfig
from echo2d.learner.saving.checkpoint import Checkpoints
from echo2d.learner.train import Learner
from tests.support.learner import config_in, learn
from tests.support.lora import OnBase

STEPS = 3
OTHER = TinyRecipe(accuracy_stop=0.0, batch=8, layers=1, rng_seed=1)
TARGETS = ("q_proj", "up_proj")


@pytest.fixture
def config(tmp_path: Path, base: Path) -> LearnerConfig:
    return config_in(
        tmp_path, base, steps=STEPS, lr=1e-2, warmup_steps=0, lora_rank=4, lora_targets=TARGETS
    )


def weights(coordinator: OnBase, version: int) -> dict[str, torch.Tensor]:
    return load_file(coordinator.published(version) / "adapter_model.safetensors")


def test_every_version_is_an_adapter_of_the_base(
    config: LearnerConfig, base: Path, tmp_path: Path
) -> None:
    coordinator = OnBase(tmp_path / "taken", base)
    rows = learn(config, coordinator)
    assert [row["ratio_mean"] for row in rows] == pytest.approx([1.0] * STEPS, abs=0.01), (
        "it trains what it published"
    )
    first, last = weights(coordinator, 0), weights(coordinator, STEPS)
    shapes = {name: (tensor.dtype, tensor.shape) for name, tensor in last.items()}
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    assert shapes[f"{layer}.lora_A.weight"] == (torch.bfloat16, (4, 96))
    assert shapes[f"{layer}.lora_B.weight"] == (torch.bfloat16, (128, 4))
    assert len(shapes) == 2 * len(TARGETS)
    for name, tensor in first.items():
        assert (tensor.count_nonzero() > 0) == ("lora_A" in name), "version 0 is the base model"
        assert not torch.equal(tensor, last[name])
    assert pinned_base(coordinator.published(STEPS)) == base_digest(base)
    state = {
        "model": {
            name.removeprefix("base_model.model."): torch.zeros(last[name].shape) for name in last
        }
    }
    Checkpoints(config.out_dir / "checkpoints", 2).load_newest(state)
    assert all(
        torch.equal(each.bfloat16(), last[f"base_model.model.{name}"])
        for name, each in state["model"].items()
    )


def test_a_stopped_learner_resumes_to_the_same_adapter(
    config: LearnerConfig, base: Path, tmp_path: Path
) -> None:
    straight = OnBase(tmp_path / "taken", base)
    learn(config, straight)
    config = dataclasses.replace(config, out_dir=tmp_path / "other")
    again, prefetch = OnBase(tmp_path / "taken2", base), BatchPrefetch()
    again.on_commit = lambda step: prefetch.stop() if step == 1 else None
    learn(config, again, prefetch=prefetch)
    learn(config, again, resume=True)
    assert again.said("session") == [0, 1]
    resumed = weights(again, STEPS)
    assert all(
        torch.equal(tensor, resumed[name]) for name, tensor in weights(straight, STEPS).items()
    )


def test_a_checkpoint_of_other_weights_is_refused(
    config: LearnerConfig, base: Path, tmp_path: Path
) -> None:
    learn(dataclasses.replace(config, steps=1), OnBase(tmp_path / "taken", base))
    coordinator = OnBase(tmp_path / "taken2", base)
    for change in ({"lora_rank": 8}, {"lora_rank": 0}, {"lora_targets": ("q_proj",)}):
        with pytest.raises(OperatorFault, match="does not fit"):
            learn(dataclasses.replace(config, **change), coordinator, resume=True)
    assert coordinator.events == []


def test_an_adapter_of_another_base_is_refused(
    config: LearnerConfig, base: Path, tmp_path: Path
) -> None:
    coordinator = OnBase(tmp_path / "taken", base)
    learn(dataclasses.replace(config, steps=1), coordinator)
    other = dataclasses.replace(config, model=make_tiny_model(tmp_path / "models", OTHER))
    with pytest.raises(
        OperatorFault, match=r"learner\.model: the adapter in .* belongs to another base model"
    ):
        learn(other, coordinator, resume=True)
    assert coordinator.said("session") == [0]


@pytest.mark.parametrize("target", ["q_prjo", "model", "embed_tokens", ""])
def test_a_target_must_be_linear_layers(config: LearnerConfig, target: str) -> None:
    wrong = dataclasses.replace(config, lora_targets=(*TARGETS, target))
    with pytest.raises(OperatorFault, match=r"learner\.lora_targets"):
        Learner(wrong, cast("Coordinator", None), BatchPrefetch(), resume=False)
