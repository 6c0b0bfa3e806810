"""Applies a LoRA adapter beside a model's weights: each linear layer that it names adds its share.

Nothing is merged. So the base's weights stay as they were verified, bit for bit, whatever adapters
come and go; the adapter's own tensors can be overwritten in place and read back; and the layers add
in the same order as they did in training.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from echo2d.engines.adapter import AdapterLayout
from echo2d.errors import EngineFault

_Hook = Callable[[Any, tuple[Tensor, ...], Tensor], Tensor]


def attach(model: Any, adapter: AdapterLayout, tensors: Mapping[str, Tensor]) -> None:
    """Add a forward hook to each layer that the adapter names.

    Each call uses the tensors' current values. EngineFault: they do not fit the model's layers.
    """
    for name, (a, b) in adapter.layers.items():
        layer = _linear_layer(model, name)
        fitting = (adapter.rank, layer.in_features), (layer.out_features, adapter.rank)
        if (tensors[a].shape, tensors[b].shape) != fitting:
            raise EngineFault(
                f"the adapter's tensors for {name} have shapes {tuple(tensors[a].shape)} and "
                f"{tuple(tensors[b].shape)}, expected {fitting[0]} and {fitting[1]}"
            )
        layer.register_forward_hook(_beside(tensors[a], tensors[b], adapter.scale))


def _linear_layer(model: Any, name: str) -> torch.nn.Linear:
    try:
        layer = model.get_submodule(name)
    except AttributeError:
        layer = None
    if not isinstance(layer, torch.nn.Linear):
        raise EngineFault(f"the adapter names {name}, which is not a linear layer of the base")
    return layer


def _beside(a: Tensor, b: Tensor, scale: float) -> _Hook:
    def hook(_: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        low = torch.nn.functional.linear(inputs[0], a)
        return output + torch.nn.functional.linear(low, b) * scale

    return hook
