"""Replay the experts that the engines chose, and measure how a mixture of experts spreads its tokens.

Routers take the experts of the micro-batch that `replaying` was last called with; so the repetition of a layer in the
backward pass takes them too. A hook on each router sums up a forward pass, but only inside `Routers.counting`. So
repetitions in the backward pass, and passes that train nothing, do not count. A router that does not return its chosen
experts is not measured.

Suffixes of names: t = tokens of the pass, e = experts of a layer, c = experts that a token is sent to.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from echo2d.client import OperatorFault
from echo2d.learner.batch.packing import MicroBatch
from echo2d.learner.metrics.report import RouterLoad
from echo2d.learner.ranks.ranks import Ranks
from echo2d.learner.ranks.row_ranks import RowRanks
from echo2d.model_experts import Router, chosen_experts, replay, routers_of, shape_of

# The sums of one layer [e + 4]: tokens of each expert, answer tokens whose experts were replayed, answer tokens,
# normalized entropies of all tokens, number of tokens. They are float64, in which counts are exact.
LayerSums = Tensor


class Routers:
    """The routers of a model of transformers, with hooks if `hooked`. A dense model has none."""

    def __init__(self, model: nn.Module, device: torch.device, *, hooked: bool = True) -> None:
        self._found: list[LayerSums] = []
        # The indices of all tokens but padding. None: nothing is counted.
        self._places_t: Tensor | None = None
        # Answer tokens of the pass that have experts to replay, and all answer tokens.
        self._replayed = (0, 0)
        self._given_tlc: Tensor | None = None
        self._device, self._hooked = device, hooked
        routers = routers_of(model)
        self.shape = shape_of(model, routers)
        if not hooked:
            return
        for router in routers:
            router.module.register_forward_hook(partial(self._add_up, router))
        if self.shape is not None:
            replay(routers, self._given)

    def replaying(self, micro: MicroBatch, row_ranks: RowRanks) -> None:
        """From now on the routers choose the experts that the engines chose for the tokens of `micro`.

        OperatorFault: the layers are compiled, so their routers cannot be given experts.
        """
        self._given_tlc = None
        if micro.experts_tlc is None:
            return
        if not self._hooked:
            raise OperatorFault(
                "learner.compile: expected false, because the engines tell the experts of their tokens "
                "(policy.columns), and routers in compiled layers cannot replay them; found true"
            )
        own = row_ranks.own(micro.tokens_bt.size)
        self._given_tlc = torch.from_numpy(micro.experts_tlc[own]).to(self._device)

    def _given(self, layer: int) -> Tensor | None:
        return None if self._given_tlc is None else self._given_tlc[:, layer].long()

    @contextlib.contextmanager
    def counting(self, micro: MicroBatch, row_ranks: RowRanks) -> Iterator[list[LayerSums]]:
        """Count the forward pass over this rank's slice of `micro` that runs inside. The list gets the sums of each
        layer with experts.
        """
        own = row_ranks.own(micro.tokens_bt.size)
        places = micro.places[own] - own.start
        self._replayed = (_told(micro), micro.tokens)
        self._found, self._places_t = [], torch.from_numpy(places).to(self._device)
        try:
            yield self._found
        finally:
            self._places_t = None

    def _taken(self, layer: int, chosen_tc: Tensor) -> float | Tensor:
        """The share of the given tokens here that were sent to the given experts."""
        given_tc = self._given(layer)
        if given_tc is None or self._places_t is None:
            return 1.0
        given_tc = given_tc.index_select(0, self._places_t)
        is_given_t = given_tc[:, 0] >= 0
        same_t = (given_tc.sort(-1).values == chosen_tc.sort(-1).values).all(-1)
        # Without given tokens here: of 0 tokens all.
        return ((same_t & is_given_t).sum() / is_given_t.sum()).nan_to_num(1.0)

    @torch.no_grad()
    def _add_up(self, router: Router, _: nn.Module, __: object, output: Any) -> None:
        """Sum up one layer. A forward hook of its router."""
        if self._places_t is None or (chosen := chosen_experts(output)) is None:
            return
        logits_te, chosen_tc = (
            each.flatten(0, -2).index_select(0, self._places_t)
            for each in (output[router.logits], chosen)
        )
        tokens, experts = logits_te.shape
        entropy_t = torch.special.entr(logits_te.float().softmax(-1)).sum(-1)
        sums = torch.zeros(experts + 4, dtype=torch.float64, device=logits_te.device)
        sums.index_add_(0, chosen_tc.flatten(), sums.new_ones(chosen_tc.numel()))
        told, sums[-3] = self._replayed
        # The routers of some families do not take what they are given.
        sums[-4] = told * self._taken(router.layer, chosen_tc)
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
    loads = [layer[:-4] for layer in layers]
    replayed, answers, entropies, tokens = (
        torch.stack([layer[-4:] for layer in layers]).sum(0).tolist()
    )
    return RouterLoad(
        load_max=max(float(load_e.max() / load_e.mean()) for load_e in loads),
        unused=float((torch.cat(loads) == 0).double().mean()),
        entropy=entropies / tokens,
        replayed=replayed / max(1, answers),
    )


def _told(micro: MicroBatch) -> int:
    """How many of the tokens in the loss have experts to replay."""
    if micro.experts_tlc is None:
        return 0
    rows, columns = micro.answer_bt[:, 1:].nonzero()
    told_t = micro.experts_tlc[:, 0, 0] >= 0
    return int(told_t[rows * micro.tokens_bt.shape[1] + columns].sum())
