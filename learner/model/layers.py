"""Prepare the layers of a model: what they keep for the backward pass, and whether they are compiled.

learner.recompute decides which results of a layer the backward pass computes again instead of keeping them in memory:

    none        nothing: the most memory
    selective   all except the results of attention and of every second matrix product; if experts have biases,
                their products are computed again too, because transformers adds the biases in place
    all         the whole layer, from its input: the least memory, a third more work
"""

from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from echo2d.client import OperatorFault
from echo2d.learner.config import LearnerConfig
from echo2d.learner.ranks.ranks import layers_of

# Parts of the names of kernels, in any library.
ATTENTION = ("scaled_dot_product", "flash_att", "varlen_att")
PRODUCTS = {"mm", "addmm", "bmm", "_grouped_mm"}
_OF_EXPERTS = {"bmm", "_grouped_mm"}


def prepare_layers(model: Any, config: LearnerConfig, device: torch.device) -> None:
    """Make the layers keep what the config says. Call it before they are sharded; `compile_layers` does it for compiled
    layers. OperatorFault: the model does not support it.
    """
    chosen = config.explicit(cuda=device.type == "cuda")
    if chosen.recompute == "none" or chosen.compile:
        return
    # The second name is that of older versions of transformers.
    enable = (
        getattr(model, "activation_checkpointing_enable", None)
        or model.gradient_checkpointing_enable
    )
    try:
        enable(_how(model, chosen.recompute))
    except ValueError as error:
        raise OperatorFault(
            f"learner.recompute: the model in {config.model} does not support it: {error}"
        ) from error


def compile_layers(model: Any, config: LearnerConfig, device: torch.device) -> None:
    """Compile the layers in place, after they were sharded. The recomputation of a layer is compiled with it, so that
    the config decides what is kept, not the compiler. All layers of a kind share one piece of code, for any number of
    tokens.
    """
    what = config.explicit(cuda=device.type == "cuda").recompute
    how = _how(model, what)

    def run(layer: nn.Module, hidden: Tensor, *others: Any, **named: Any) -> Any:
        def forward(hidden: Tensor) -> Any:
            return type(layer).forward(layer, hidden, *others, **named)

        if what == "none" or not torch.is_grad_enabled():
            return forward(hidden)
        return checkpoint(forward, hidden, **how)

    compiled = torch.compile(run, dynamic=True)
    for layer in layers_of(model):
        layer.forward = partial(compiled, layer)


def _how(model: Any, what: str) -> dict[str, Any]:
    """The keywords of `checkpoint`."""
    how: dict[str, Any] = {"use_reentrant": False}
    if what == "selective":
        # A kept result must not be changed, but the biases of experts are added to their products in place.
        biased = any(getattr(module, "has_bias", False) for module in model.modules())
        how["context_fn"] = partial(_contexts, PRODUCTS - _OF_EXPERTS if biased else PRODUCTS)
    return how


def _contexts(products: AbstractSet[str]) -> Any:
    """The two context managers of one run of a layer: for the forward pass, and for its repetition."""
    return create_selective_checkpoint_contexts(_Keeping(products))  # type: ignore[no-untyped-call]


class _Keeping:
    """Decides for each operation of a layer, in order, whether its result is kept. products: keep every second one.

    Until torch 2.12 it is called again in the backward pass and must decide as before, so each pass has its own count.
    """

    def __init__(self, products: AbstractSet[str]) -> None:
        self._names = products
        self._products = {False: 0, True: 0}

    def __call__(self, run: Any, operation: Any, *__: Any, **___: Any) -> CheckpointPolicy:
        name = operation._schema.name.split("::")[-1]  # noqa: SLF001 - an operation has no other name
        kept = name.lstrip("_").startswith(ATTENTION)
        if name in self._names:
            self._products[run.is_recompute] += 1
            kept = self._products[run.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
