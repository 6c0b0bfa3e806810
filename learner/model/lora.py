"""Train a LoRA adapter beside the frozen base model.

    y = W x + (alpha / rank) * B (A x)

A [rank, in] starts random and B [out, rank] zero, so version 0 is the base model. Only A and B of
the layers that learner.lora_targets names are trained, checkpointed and published (`saving.adapter`).
"""

import math
from typing import Any, cast

import torch
from torch import Tensor, nn

from echo2d.client import OperatorFault
from echo2d.learner.config import LearnerConfig
from echo2d.learner.ranks.ranks import own_shard
from echo2d.learner.saving.shards import first_row


def attach(model: Any, config: LearnerConfig) -> None:
    """Freeze the model and add an adapter to the target layers, on the device of the model.

    OperatorFault: a target names no linear layer, or the head, whose weights are read in blocks.
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
        if model.get_output_embeddings() in layers:
            raise OperatorFault(f"learner.lora_targets: the head, {target!r}, gets no adapter")
        for layer in layers:
            _attach(layer, config.lora_rank, config.lora_alpha / config.lora_rank)


@torch.no_grad()
def initialize(model: nn.Module) -> None:
    """Fill the adapters: A as PEFT does, and B with zeros. A is the same on all ranks if their generators are."""
    for layer in model.modules():
        if isinstance(first := getattr(layer, "lora_A", None), nn.Linear):
            bound = 1.0 / math.sqrt(first.in_features)
            whole = torch.empty(first.weight.shape).uniform_(-bound, bound)
            local, start = own_shard(first.weight), first_row(first.weight)
            local.copy_(whole[start : start + len(local)])
            own_shard(cast("nn.Linear", layer.lora_B).weight).zero_()


def trained(model: nn.Module) -> dict[str, Tensor]:
    """The weights that are trained, by name: those of the adapter, or all weights if there is no
    adapter.
    """
    state = model.state_dict()
    # In the order of the model: checkpoints of the same weights then have the same bytes.
    names = [name for name, weight in model.named_parameters() if weight.requires_grad]
    return {name: state[name] for name in names} if any(map(_is_ours, names)) else state


def _attach(layer: Any, rank: int, scale: float) -> None:
    device = layer.weight.device
    layer.lora_A = nn.Linear(layer.in_features, rank, bias=False, device=device)
    layer.lora_B = nn.Linear(rank, layer.out_features, bias=False, device=device)

    def add(this: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        share: Tensor = this.lora_B(this.lora_A(inputs[0])) * scale
        return output + share

    layer.register_forward_hook(add)


def _is_ours(name: str) -> bool:
    return name.endswith((".lora_A.weight", ".lora_B.weight"))
