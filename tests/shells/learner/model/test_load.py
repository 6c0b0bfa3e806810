"""Models of several families: loaded in slices, published under the names and with the bytes of their files."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from echo2d.client import OperatorFault
from echo2d.learner.config import LearnerConfig
from echo2d.learner.model.load import empty_model, load_model
from echo2d.learner.saving.layout import WeightPart, layout_of
from tests.support.learner import learn
from tests.support.model_shapes import FAMILIES, saved
from tests.support.paths import REPO
from tests.support.scripted_coordinator import ScriptedCoordinator


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_loaded_as_transformers_loads_it(
    family: str, base: Path, tmp_path: Path
) -> None:
    model = saved(tmp_path / "model", family, base)
    mine, theirs = (
        each.state_dict()
        for each in (
            load_model(model),
            AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        )
    )
    assert mine.keys() == theirs.keys()
    for name, weight in mine.items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, theirs[name]), name
    tokens = torch.tensor([[3, 1, 2, 5, 4, 9]])
    ours, expected = (
        load_model(model).eval(),
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval(),
    )
    torch.testing.assert_close(ours(tokens).logits, expected(tokens).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_closed_loop_publishes_the_names_of_the_files_and_at_first_their_bytes(
    family: str, base: Path, config: LearnerConfig, tmp_path: Path
) -> None:
    model = saved(tmp_path / "model", family, base)
    coordinator = ScriptedCoordinator(tmp_path / "taken")
    rows = learn(dataclasses.replace(config, model=model, steps=2), coordinator)
    assert [row["step"] for row in rows] == [1, 2]
    assert all(0 < row["grad_norm"] < 1e6 for row in rows)
    first, last = (
        load_file(coordinator.published(version) / "model.safetensors") for version in (0, 2)
    )
    original = load_file(model / "model.safetensors")
    assert first.keys() == last.keys() == original.keys()
    assert all(torch.equal(first[name], tensor) for name, tensor in original.items())
    changed = [name for name, tensor in original.items() if not torch.equal(last[name], tensor)]
    assert len(changed) > len(original) / 2
    AutoModelForCausalLM.from_pretrained(coordinator.published(2))


def test_an_expert_is_loaded_as_a_part_of_a_stacked_weight(base: Path, tmp_path: Path) -> None:
    model = saved(tmp_path / "model", "mixtral", base)
    (parts,) = layout_of(empty_model(model), model).values()
    weight = "model.layers.1.mlp.experts.gate_up_proj"
    prefix = "model.layers.1.block_sparse_moe"
    assert parts[f"{prefix}.experts.3.w1.weight"] == WeightPart(weight, 3, 0, 48)
    assert parts[f"{prefix}.experts.3.w3.weight"] == WeightPart(weight, 3, 48, 96)
    assert parts[f"{prefix}.gate.weight"] == WeightPart("model.layers.1.mlp.gate.weight")


def changed(model: Path, **tensors: Any) -> None:
    """Replace tensors of the model's file; None: leave one out."""
    path = model / "model.safetensors"
    found = {**load_file(path), **tensors}
    left = {name: tensor for name, tensor in found.items() if tensor is not None}
    save_file(left, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("name", "tensor", "line"),
    [
        (
            "model.layers.0.mlp.experts.2.down_proj.weight",
            None,
            "lacks the weights model.layers.0.mlp",
        ),
        (
            "model.norm.weight",
            torch.zeros(31),
            r"model.norm.weight has the shape \[31\]; the model's is",
        ),
        (
            "model.other.weight",
            torch.zeros(3),
            "1 tensors are not weights of the model, e.g. model.other",
        ),
        (
            "model.norm.weight",
            torch.full((32,), torch.nan),
            r"model.norm.weight in .*model.safetensors holds NaN or infinity: download it again",
        ),
        (
            "model.layers.0.mlp.experts.2.down_proj.weight",
            torch.full((32, 24), -torch.inf),
            r"experts.2.down_proj.weight in .* holds NaN or infinity",
        ),
    ],
)
def test_files_that_do_not_fit_are_the_operators_fault(
    base: Path, tmp_path: Path, name: str, tensor: Any, line: str
) -> None:
    model = saved(tmp_path / "model", "qwen3 moe", base)
    changed(model, **{name: tensor})
    with pytest.raises(OperatorFault, match=line):
        load_model(model)


def test_a_quantized_model_is_the_operators_fault(base: Path, tmp_path: Path) -> None:
    model = saved(tmp_path / "model", "qwen3", base)
    facts = json.loads((model / "config.json").read_text())
    facts["quantization_config"] = {"quant_method": "mxfp4"}
    (model / "config.json").write_text(json.dumps(facts))
    with pytest.raises(OperatorFault, match=r"is quantized \(mxfp4\); convert it to bfloat16"):
        load_model(model)


def test_the_page_lists_the_architectures_that_the_tests_train() -> None:
    page = (REPO / "docs" / "reference" / "models.md").read_text()
    rows = re.findall(r"^\| `(\w+)`[^|]* \| yes \|", page, re.MULTILINE)
    assert sorted(rows) == sorted(
        type(each).__name__.removesuffix("Config") for each in FAMILIES.values()
    )
