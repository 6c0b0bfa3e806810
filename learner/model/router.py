"""Measure how a mixture of experts spreads its tokens.

A hook on each router sums up a forward pass, but only inside `Routers.counting`. So repetitions in the backward pass,
and passes that train nothing, do not count. transformers knows which modules are routers, because it
can record their output. A router that does not return its chosen experts is not measured.

Suffixes of names: t = tokens of the pass, e = experts of a layer, c = experts that a token is sent to.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from echo2d.learner.batch.packing import MicroBatch
from echo2d.learner.metrics.report import RouterLoad
from echo2d.learner.ranks.ranks import Ranks
from echo2d.learner.ranks.row_ranks import RowRanks

# The sums of one layer [e + 2]: tokens of each expert, normalized entropies of all tokens, number of tokens. They are
# float64, in which counts are exact.
LayerSums = Tensor


class Routers:
    """The routers of a model of transformers, with hooks if `hooked`. A dense model has none."""

    def __init__(self, model: nn.Module, *, hooked: bool = True) -> None:
        self._found: list[LayerSums] = []
        # The indices of all tokens but padding. None: nothing is counted.
        self._places_t: Tensor | None = None
        for router, index in _routers_of(model) if hooked else ():
            router.register_forward_hook(partial(self._add_up, index))

    @contextlib.contextmanager
    def counting(
        self, micro: MicroBatch, row_ranks: RowRanks, device: torch.device
    ) -> Iterator[list[LayerSums]]:
        """Count the forward pass over this rank's slice of `micro` that runs inside. The list gets the sums of each
        layer with experts.
        """
        own = row_ranks.own(micro.tokens_bt.size)
        places = micro.places[own] - own.start
        self._found, self._places_t = [], torch.from_numpy(places).to(device)
        try:
            yield self._found
        finally:
            self._places_t = None

    @torch.no_grad()
    def _add_up(self, index: int, _: nn.Module, __: object, output: Any) -> None:
        """Sum up one layer. A forward hook of its router, whose output has the logits at `index`."""
        if self._places_t is None or (chosen := _chosen(output)) is None:
            return
        logits_te, chosen_tc = (
            each.flatten(0, -2).index_select(0, self._places_t) for each in (output[index], chosen)
        )
        tokens, experts = logits_te.shape
        entropy_t = torch.special.entr(logits_te.float().softmax(-1)).sum(-1)
        sums = torch.zeros(experts + 2, dtype=torch.float64, device=logits_te.device)
        sums.index_add_(0, chosen_tc.flatten(), sums.new_ones(chosen_tc.numel()))
        sums[-2] = entropy_t.double().sum() / math.log(experts)
        sums[-1] = tokens
        self._found.append(sums)


def router_load(passes: Sequence[Sequence[LayerSums]], ranks: Ranks) -> RouterLoad | None:
    """The load in the forward passes of all ranks, which call this together. None: a dense model."""
    layers = [torch.stack(layer).sum(0) for layer in zip(*passes, strict=True)]
    if not layers:
        return None
    whole = ranks.add_up(torch.cat(layers)).cpu()
    return load_of(torch.split(whole, [len(layer) for layer in layers]))


def load_of(layers: Sequence[LayerSums]) -> RouterLoad:
    """Compute the load from the sums of all layers."""
    loads = [layer[:-2] for layer in layers]
    entropies, tokens = torch.stack([layer[-2:] for layer in layers]).sum(0).tolist()
    return RouterLoad(
        load_max=max(float(load_e.max() / load_e.mean()) for load_e in loads),
        unused=float((torch.cat(loads) == 0).double().mean()),
        entropy=entropies / tokens,
    )


def _routers_of(model: nn.Module) -> list[tuple[nn.Module, int]]:
    """Each router, with the index of the logits in its output."""
    found: dict[nn.Module, int] = {}
    for part in model.modules():
        recorders = (getattr(part, "can_record_outputs", None) or {}).get("router_logits", [])
        for recorder in recorders if isinstance(recorders, list) else [recorders]:
            found.update(_matching(part, recorder))
    return list(found.items())


def _matching(model: nn.Module, recorder: Any) -> Iterator[tuple[nn.Module, int]]:
    """The modules whose output this recorder of transformers records. It is an OutputRecorder or only a class."""
    # A recorder that does not name a class is left out.
    target = getattr(recorder, "target_class", recorder)
    wanted: tuple[type, ...] = (target,) if isinstance(target, type) else ()
    within = getattr(recorder, "layer_name", None) or ""
    for name, module in model.named_modules():
        matches: bool = isinstance(module, wanted)
        if matches and within in name:
            yield module, int(getattr(recorder, "index", 1))


def _chosen(output: Any) -> Tensor | None:
    """The experts that each token is sent to: the integers in a router's output."""
    parts = output if isinstance(output, tuple) else ()
    return next((each for each in parts if each.dtype in (torch.int64, torch.int32)), None)
