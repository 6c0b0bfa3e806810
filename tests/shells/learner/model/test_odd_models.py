"""Odd model directories have the weights of `from_pretrained`, also when they are published, or are refused."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Glm4MoeConfig

from echo2d.client import OperatorFault
from echo2d.learner.config import LearnerConfig
from echo2d.learner.model.load import load_model
from tests.support.learner import learn
from tests.support.model_shapes import MOE, SMALL, made
from tests.support.odd_models import INDEX, draw, keep, shard
from tests.support.scripted_coordinator import ScriptedCoordinator

SEEDS, QUICK = range(60), 16
later = pytest.mark.nightly


@pytest.mark.parametrize(
    "seed", [*SEEDS[:QUICK], *(pytest.param(each, marks=later) for each in SEEDS[QUICK:])]
)
def test_loaded_weights_equal_those_of_from_pretrained(
    seed: int, base: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    drawn = draw(seed, model, base)
    if not drawn[2]:
        with pytest.raises(OperatorFault, match=r"^learner\.model: |^/") as refused:
            load_model(model)
        assert "\n" not in str(refused.value)
        return
    mine = load_model(model).state_dict()
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()
    assert mine.keys() == theirs.keys(), drawn
    for name, weight in mine.items():
        assert torch.equal(weight, theirs[name]), (drawn, name)


@pytest.mark.parametrize(
    "seed", [1, 4, 6, *(pytest.param(each, marks=later) for each in range(16, 24))]
)
def test_a_published_version_has_the_same_weights(
    seed: int, base: Path, config: LearnerConfig, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    draw(seed, model, base)
    coordinator = ScriptedCoordinator(tmp_path / "taken")
    learn(dataclasses.replace(config, model=model, steps=1), coordinator)
    published = coordinator.published(0)
    first = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).state_dict()
    again = AutoModelForCausalLM.from_pretrained(published, dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(weight, first[name]) for name, weight in again.items())
    assert load_model(published).state_dict().keys() == again.keys()


def test_weights_that_the_class_ignores_are_left_out(
    base: Path, config: LearnerConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The ignored layers predict several tokens at once. They are in the index, and in a file of their own."""
    model = tmp_path / "model"
    shapes = {**SMALL, **MOE, "num_hidden_layers": 46, "vocab_size": 17}
    small = Glm4MoeConfig(**shapes, n_routed_experts=4, first_k_dense_replace=1)
    made(small).to(torch.bfloat16).save_pretrained(model)
    shutil.copy(base / "tokenizer.json", model)
    shard(model, 2)
    keep(model, {"model.layers.46.eh_proj.weight": torch.ones(2, 2)}, "mtp.safetensors")
    index = json.loads((model / INDEX).read_text())
    index["weight_map"]["model.layers.46.eh_proj.weight"] = "mtp.safetensors"
    (model / INDEX).write_text(json.dumps(index))
    with caplog.at_level("INFO"):
        assert load_model(model).state_dict().keys() == made(small).state_dict().keys()
    assert "1 tensors are left out, as Glm4MoeForCausalLM does" in caplog.text
    coordinator = ScriptedCoordinator(tmp_path / "taken")
    learn(dataclasses.replace(config, model=model, steps=1), coordinator)
    published = coordinator.published(0)
    files = {*json.loads((published / INDEX).read_text())["weight_map"].values()}
    assert files == {path.name for path in published.glob("*.safetensors")}
    assert "mtp.safetensors" not in files
    AutoModelForCausalLM.from_pretrained(published)


def test_an_index_that_is_not_used_is_not_published(
    base: Path, config: LearnerConfig, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    assert draw(4, model, base)[1] == "both"
    coordinator = ScriptedCoordinator(tmp_path / "taken")
    learn(dataclasses.replace(config, model=model, steps=1), coordinator)
    published = coordinator.published(0)
    assert [path.name for path in published.glob("*.safetensors*")] == ["model.safetensors"]
