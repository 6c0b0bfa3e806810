"""Prepare the layers of a model: what they keep for the backward pass, and whether they are compiled.

learner.recompute says which results of a layer the backward pass makes again instead of finding them in memory:

    none        nothing: the most memory
    selective   all but the results of attention and of every second matrix product; of experts with biases, which
                transformers adds in place, no product is kept
    all         the whole layer, from what enters it: the least memory, a third more work
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

# Kernels by name, in whichever library they are.
ATTENTION = ("scaled_dot_product", "flash_att", "varlen_att")
PRODUCTS = {"mm", "addmm", "bmm", "_grouped_mm"}
_OF_EXPERTS = {"bmm", "_grouped_mm"}


def prepare_layers(model: Any, config: LearnerConfig, device: torch.device) -> None:
    """Make the layers keep what the config says, before they are sharded; `compile_layers` does it for compiled ones.
    OperatorFault: the model does not support it.
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
    """Compile the layers in place, after they were sharded, each with what it recomputes, so that the compiler decides
    nothing that the config decides. One piece of code serves all layers of a kind, for any number of tokens.
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
        # A result that is kept must not be changed, and a bias of experts is added to the product itself.
        biased = any(getattr(module, "has_bias", False) for module in model.modules())
        how["context_fn"] = partial(_contexts, PRODUCTS - _OF_EXPERTS if biased else PRODUCTS)
    return how


def _contexts(products: AbstractSet[str]) -> Any:
    """The two context managers of one run of a layer, forward and again."""
    return create_selective_checkpoint_contexts(_Keeping(products))  # type: ignore[no-untyped-call]


class _Keeping:
    """Decides for each operation of a layer, in order, whether its result is kept. products: every second one is.

    Until torch 2.12 it is asked again in the backward pass, and must answer as before: each pass counts for itself.
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
