"""Models that cannot be loaded."""

import dataclasses
import os
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from echo2d.client import OperatorFault
from echo2d.learner.config import LearnerConfig
from echo2d.learner.model.load import load_model
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
    with pytest.raises(OperatorFault, match=r"learner\.model: .* is cut off or damaged"):
        learn(dataclasses.replace(config, model=model), coordinator)
