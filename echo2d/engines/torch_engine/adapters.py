"""Adapters beside the weights of their base, each under its version's label.

Each linear layer that the adapters name adds the output of its row's adapter to its own; nothing is merged. So the
base's weights stay as they were verified, bit for bit, and the layers add in the same order as in training. The rows of
a pass may have different adapters: then each adapter computes its own rows.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from echo2d.engines.adapter import AdapterLayout
from echo2d.errors import EngineFault

_Hook = Callable[[Any, tuple[Tensor, ...], Tensor], Tensor]


class AdapterTable:
    """The adapters of one shape and scale on `model`. newest: the label of the one that was added last."""

    def __init__(
        self, model: Any, layout: AdapterLayout, tensors: Mapping[str, Tensor], label: str
    ) -> None:
        """EngineFault: the tensors do not fit the model's layers."""
        self.newest = label
        self._adapters = {label: tensors}
        self._scale = layout.scale
        # The adapter of each row of the next pass, or one for all.
        self.rows: Sequence[str] = (label,)
        for name, (a, b) in layout.layers.items():
            layer = _linear_layer(model, name)
            layout.require_shapes(
                name, tensors[a].shape, tensors[b].shape, layer.in_features, layer.out_features
            )
            layer.register_forward_hook(self._beside(a, b))

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Those of the newest adapter."""
        return self._adapters[self.newest]

    def keep(self, used: Collection[str]) -> None:
        """Drop the adapters that are neither in use nor the newest one."""
        kept = {self.newest, *used}
        self._adapters = {each: self._adapters[each] for each in self._adapters if each in kept}

    def add(self, tensors: Mapping[str, Tensor], label: str, used: Collection[str]) -> None:
        """Add an adapter, and drop those that are not in use."""
        self._adapters = {each: self._adapters[each] for each in self._adapters if each in used}
        self._adapters[label] = tensors
        self.newest, self.rows = label, (label,)

    def _beside(self, a: str, b: str) -> _Hook:
        def share(label: str, states: Tensor) -> Tensor:
            tensors = self._adapters[label]
            low = torch.nn.functional.linear(states, tensors[a])
            return torch.nn.functional.linear(low, tensors[b]) * self._scale

        def hook(_: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            (states,) = inputs
            labels = dict.fromkeys(self.rows)
            if len(labels) == 1:
                return output + share(self.rows[0], states)
            found = output.clone()
            for label in labels:
                own = [row for row, each in enumerate(self.rows) if each == label]
                found[own] += share(label, states[own])
            return found

        return hook


def _linear_layer(model: Any, name: str) -> torch.nn.Linear:
    try:
        layer = model.get_submodule(name)
    except AttributeError:
        layer = None
    if not isinstance(layer, torch.nn.Linear):
        raise EngineFault(f"the adapter names {name}, which is not a linear layer of the base")
    return layer
