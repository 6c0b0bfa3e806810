"""Models that cannot be loaded; learning rates; random number generators."""

import dataclasses
import os
import random
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from echo2d.client import OperatorFault
from echo2d.learner.config import LearnerConfig
from echo2d.learner.model.load import load_model
from echo2d.learner.model.policy import (
    LrSchedule,
    generator_states,
    lr_share,
    restore_generators,
    seed_generators,
)
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


# --- learning rates over a run of 12 steps; the first two are the warm-up

STEPS, WARM_UP = 12, 2


def shares(
    schedule: LrSchedule, last_share: float = 0.0, warmup_steps: int = WARM_UP
) -> list[float]:
    settings = {"steps": STEPS, "warmup_steps": warmup_steps, "last_share": last_share}
    return [lr_share(step, schedule=schedule, **settings) for step in range(1, STEPS + 1)]  # type: ignore[arg-type]


def test_a_constant_rate_is_reached_at_the_end_of_the_warm_up() -> None:
    assert shares("constant") == [0.5] + [1.0] * 11
    assert shares("constant", warmup_steps=0) == [1.0] * 12


def test_a_linear_rate_falls_evenly_to_its_last_share() -> None:
    assert shares("linear") == pytest.approx([0.5, *[1 - step / 10 for step in range(11)]])
    assert shares("linear", 0.1)[-1] == pytest.approx(0.1)


def test_a_cosine_rate_is_halfway_in_the_middle_and_falls_fastest_there() -> None:
    found = shares("cosine", 0.2)
    assert found[1] == 1.0
    assert found[6] == pytest.approx(0.6)
    assert found[-1] == pytest.approx(0.2)
    falls = [left - right for left, right in pairwise(found[1:])]
    assert max(falls) in falls[4:6]


def test_the_rate_stays_at_its_last_share_beyond_the_last_step() -> None:
    assert lr_share(99, steps=12, warmup_steps=2, schedule="cosine", last_share=0.1) == 0.1


# --- all generators of a learner: the same draws after a restore, through a checkpoint file and back


def draws() -> list[float]:
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        np.random.normal(),
        float(torch.rand(1)),
    ]


def test_restored_generators_draw_the_same_again(tmp_path: Path) -> None:
    seed_generators(7)
    first = draws()
    torch.save(generator_states(), tmp_path / "state.pt")
    kept = torch.load(tmp_path / "state.pt", weights_only=True)
    second = draws()
    restore_generators(kept)
    assert draws() == second
    seed_generators(7)
    assert draws() == first
