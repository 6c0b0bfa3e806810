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

    def share(self, layer: str, states: Tensor) -> Tensor:
        """The term that it adds to the layer's output for these inputs."""
        a, b = self.lora.layers[layer]
        low = torch.nn.functional.linear(states, self.tensors[a])
        return torch.nn.functional.linear(low, self.tensors[b]) * self.lora.scale


class AdapterTable:
    """The adapters on `model`.

    by_label: all of them; each change assigns a new value. newest: the label of the one that was added last.
    """

    def __init__(self, model: Any, adapter: TorchAdapter, label: str) -> None:
        """EngineFault: the adapter does not fit the model's layers."""
        self._model = model
        self.by_label: Mapping[str, TorchAdapter] = {}
        self._hooked: set[str] = set()
        self.newest = label
        # The rows of the next pass that each adapter has; None: all.
        self._rows: Mapping[str, Tensor | None] = {}
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
        self.newest = label

    def use(self, rows: Sequence[str]) -> None:
        """Take the adapter of this label for each row of the next pass; a single label is for all rows."""
        places: dict[str, list[int]] = {}
        for row, label in enumerate(rows):
            places.setdefault(label, []).append(row)
        alone = len(places) == 1
        self._rows = {
            label: None if alone else torch.tensor(own, device=self._model.device)
            for label, own in places.items()
        }

    def _beside(self, layer: str) -> _Hook:
        def hook(_: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            (states,) = inputs
            found = output
            for label, own in self._rows.items():
                adapter = self.by_label[label]
                if layer not in adapter.lora.layers:
                    continue
                if own is None:
                    return output + adapter.share(layer, states)
                found = output.clone() if found is output else found
                found[own] += adapter.share(layer, states[own])
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
