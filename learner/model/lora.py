"""Train a LoRA adapter beside the frozen base model, and publish it in PEFT's format.

    y = W x + (alpha / rank) * B (A x)

A [rank, in] starts random and B [out, rank] zero, so version 0 is the base model. Only A and B of
the layers that learner.lora_targets names are trained, checkpointed and published:

    <snapshot_root>/<run>-epoch-3-version-40/
        adapter_config.json  adapter_model.safetensors  base.json
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from echo2d.client import OperatorFault, pin_base
from learner.config import LearnerConfig
from learner.saving.publish import FileLayout, SnapshotWriter

_PEFT_PREFIX = "base_model.model."


def attach(model: nn.Module, config: LearnerConfig) -> None:
    """Freeze the model and add an adapter to the target layers. OperatorFault: a target names no
    linear layer.
    """
    model.requires_grad_(requires_grad=False)
    for target in dict.fromkeys(config.lora_targets):
        layers = [
            layer for name, layer in model.named_modules() if name.rpartition(".")[2] == target
        ]
        if not layers or not all(isinstance(layer, nn.Linear) for layer in layers):
            raise OperatorFault(
                f"learner.lora_targets: {config.model} has no linear layers named {target!r}"
            )
        for layer in layers:
            _attach(layer, config.lora_rank, config.lora_alpha / config.lora_rank)


def trained(model: nn.Module) -> dict[str, Tensor]:
    """The weights that are trained, by name: those of the adapter, or all weights if there is no
    adapter.
    """
    names = {name for name, weight in model.named_parameters() if weight.requires_grad}
    state = model.state_dict()
    return {name: state[name] for name in names} if any(map(_is_ours, names)) else state


class AdapterWriter(SnapshotWriter):
    """Write versions that are adapters. base_digest: digest of the base model they belong to."""

    def __init__(
        self, config: LearnerConfig, run_id: str, weights: Mapping[str, Tensor], base_digest: str
    ) -> None:
        super().__init__(config.model, config.snapshot_root, run_id, weights)
        self._config = _peft_config(config)
        self.base_digest = base_digest

    def _files(self, weights: Mapping[str, Tensor]) -> FileLayout:
        """One file; unlike the base class this needs no files of the base model."""
        return {"adapter_model.safetensors": {_PEFT_PREFIX + name: name for name in weights}}

    def _accompany(self, directory: Path) -> None:
        (directory / "adapter_config.json").write_text(json.dumps(self._config, indent=2) + "\n")
        pin_base(directory, self.base_digest)


def _attach(layer: Any, rank: int, scale: float) -> None:
    device = layer.weight.device
    # nn.Linear initialises A as PEFT does.
    layer.lora_A = nn.Linear(layer.in_features, rank, bias=False, device=device)
    layer.lora_B = nn.Linear(rank, layer.out_features, bias=False, device=device)
    nn.init.zeros_(layer.lora_B.weight)

    def add(this: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        share: Tensor = this.lora_B(this.lora_A(inputs[0])) * scale
        return output + share

    layer.register_forward_hook(add)


def _is_ours(name: str) -> bool:
    return name.endswith((".lora_A.weight", ".lora_B.weight"))


def _peft_config(config: LearnerConfig) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.model.name,
        "r": config.lora_rank,
        "lora_alpha": config.lora_alpha,
        "lora_dropout": 0.0,
        "target_modules": list(config.lora_targets),
        "bias": "none",
        "inference_mode": True,
    }
