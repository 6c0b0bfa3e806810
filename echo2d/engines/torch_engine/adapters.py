"""Adapters beside the weights of their base, each under its version's label.

Each linear layer that an adapter names adds the output of its row's adapter to its own; nothing is merged. So the
base's weights stay as they were verified, bit for bit, and the layers add in the same order as in training. The rows of
a pass may have different adapters: then each adapter computes its own rows. Adapters may differ in rank, scale and
layers.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from echo2d.engines.adapter import AdapterLayout
from echo2d.engines.layout import SnapshotLayout
from echo2d.errors import EngineFault

_Hook = Callable[[Any, tuple[Tensor, ...], Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class TorchAdapter:
    """An adapter in the memory of a device."""

    layout: SnapshotLayout
    lora: AdapterLayout
    tensors: Mapping[str, Tensor]  # by their names in the files


class AdapterTable:
    """The adapters on `model`.

    by_label: all of them; each change assigns a new value. newest: the label of the one that was added last. rows: the
    label of the adapter of each row of the next pass, or one for all.
    """

    def __init__(self, model: Any, adapter: TorchAdapter, label: str) -> None:
        """EngineFault: the adapter does not fit the model's layers."""
        self._model = model
        self.by_label: Mapping[str, TorchAdapter] = {}
        self._hooked: set[str] = set()
        self.newest = label
        self.rows: Sequence[str] = ()
        self.add(adapter, label)

    @property
    def served(self) -> TorchAdapter:
        """The newest one."""
        return self.by_label[self.newest]

    def keep(self, labels: Collection[str]) -> None:
        """Drop the adapters that are neither among these nor the newest one."""
        kept = {self.newest, *labels}
        self.by_label = {label: each for label, each in self.by_label.items() if label in kept}

    def add(self, adapter: TorchAdapter, label: str) -> None:
        """Add an adapter as the newest one. EngineFault: it does not fit the model's layers, and nothing is changed."""
        lora, tensors = adapter.lora, adapter.tensors
        layers = {name: _linear_layer(self._model, name) for name in lora.layers}
        for name, (a, b) in lora.layers.items():
            into, out = layers[name].in_features, layers[name].out_features
            lora.require_shapes(name, tensors[a].shape, tensors[b].shape, into, out)
        for name in layers.keys() - self._hooked:
            layers[name].register_forward_hook(self._beside(name))
            self._hooked.add(name)
        self.by_label = {**self.by_label, label: adapter}
        self.newest, self.rows = label, (label,)

    def _beside(self, layer: str) -> _Hook:
        def share(label: str, states: Tensor) -> Tensor | None:
            """What the adapter adds to the layer's output; None: it does not name the layer."""
            adapter = self.by_label[label]
            if layer not in adapter.lora.layers:
                return None
            a, b = adapter.lora.layers[layer]
            low = torch.nn.functional.linear(states, adapter.tensors[a])
            return torch.nn.functional.linear(low, adapter.tensors[b]) * adapter.lora.scale

        def hook(_: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            (states,) = inputs
            labels = dict.fromkeys(self.rows)
            if len(labels) == 1:
                added = share(self.rows[0], states)
                return output if added is None else output + added
            found = output.clone()
            for label in labels:
                own = [row for row, each in enumerate(self.rows) if each == label]
                if (added := share(label, states[own])) is not None:
                    found[own] += added
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
