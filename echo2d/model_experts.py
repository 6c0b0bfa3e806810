"""The routers of a mixture of experts in transformers: which experts they choose, and how they take given ones.

transformers knows which modules are routers, because it can record their output.

Router replay (R3, arXiv 2510.11370): the learner gives these experts back to its own routers. Each router computes its
logits as ever and weighs the given experts by them, so the gradient reaches the router.

Suffixes of names: t = tokens of a pass, l = layers, c = experts that a token is sent to, e = experts of a layer.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from echo2d.core.protocol.experts import ExpertShape

_TOPK = (torch.topk, Tensor.topk)


class Router(NamedTuple):
    """The router of one layer."""

    module: nn.Module
    layer: int
    logits: int  # the index of the logits in its output


def routers_of(model: nn.Module) -> list[Router]:
    """The routers of a model of transformers, in the order of its layers. A dense model has none."""
    names = {module: name for name, module in model.named_modules()}
    found: dict[nn.Module, Router] = {}
    for part in names:
        recorders = (getattr(part, "can_record_outputs", None) or {}).get("router_logits", [])
        for recorder in recorders if isinstance(recorders, list) else [recorders]:
            for router, index in _matching(part, recorder):
                layer = re.search(r"\.(\d+)\.", names[router])
                found[router] = Router(router, int(layer[1]) if layer else len(found), index)
    return sorted(found.values(), key=lambda each: each.layer)


def shape_of(model: Any, routers: list[Router]) -> ExpertShape | None:
    """The shape of the experts that these routers choose; None: there are none, or they do not say."""
    layers: int = model.config.get_text_config().num_hidden_layers
    sizes = {
        (getattr(each.module, "top_k", 0), _experts(each.module))
        for each in routers
        if each.layer < layers
    }
    if len(sizes) != 1 or len({each.layer for each in routers}) != len(routers):
        return None
    ((chosen, experts),) = sizes
    if not 0 < chosen <= experts:
        return None
    return ExpertShape(layers, chosen, experts, tuple(each.layer for each in routers))


def chosen_experts(output: Any) -> Tensor | None:
    """The experts that each token is sent to: the integers in a router's output."""
    parts = output if isinstance(output, tuple) else ()
    return next((each for each in parts if each.dtype in (torch.int64, torch.int32)), None)


def replay(routers: list[Router], given: Callable[[int], Tensor | None]) -> None:
    """From now on each router takes the experts that given(layer) returns [t, c]: -1 where it chooses itself, None if
    it chooses all.
    """
    for router in routers:
        router.module.forward = _replaying(router.module.forward, router, given)


def _replaying(
    forward: Callable[..., Any], router: Router, given: Callable[[int], Tensor | None]
) -> Callable[..., Any]:
    experts = _experts(router.module)

    def replayed(*args: Any, **kwargs: Any) -> Any:
        given_tc = given(router.layer)
        if given_tc is None:
            return forward(*args, **kwargs)
        with _GivenExperts(given_tc, experts):
            return forward(*args, **kwargs)

    return replayed


class _GivenExperts(TorchFunctionMode):
    """Replaces the choice of the experts inside a router, which families weigh in different ways."""

    def __init__(self, given_tc: Tensor, experts: int) -> None:
        super().__init__()
        self._given_tc, self._experts = given_tc, experts

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        own_tc = found.indices if function in _TOPK else None
        sizes = (self._experts, self._given_tc.shape[-1])
        # A router may choose groups of experts first.
        if own_tc is None or own_tc.shape != self._given_tc.shape:
            return found
        if (args[0].shape[-1], own_tc.shape[-1]) != sizes:
            return found
        chosen_tc = torch.where(self._given_tc < 0, own_tc, self._given_tc)
        return torch.return_types.topk((args[0].gather(-1, chosen_tc), chosen_tc))


class ExpertRecorder:
    """Records the experts that a model's routers choose in a forward pass."""

    def __init__(self, model: Any) -> None:
        routers = routers_of(model)
        self.shape = shape_of(model, routers)
        self._layers: dict[int, Tensor] = {}
        for router in routers if self.shape else ():
            router.module.register_forward_hook(self._hook(router.layer))

    def take(self, rows: int) -> Tensor | None:
        """The experts of the last pass [rows, tokens of a row, l, c], uint8 or int16; None: the model has none."""
        layers, self._layers = self._layers, {}
        if self.shape is None or len(layers) < len(self.shape.routed):
            return None
        blank = torch.zeros_like(next(iter(layers.values())))
        each = [layers.get(layer, blank) for layer in range(self.shape.layers)]
        together = torch.stack(each, dim=1)
        return together.view(rows, -1, *together.shape[1:])

    def _hook(self, layer: int) -> Callable[..., None]:
        def hook(_: nn.Module, __: object, output: Any) -> None:
            chosen = chosen_experts(output)
            if chosen is not None and self.shape is not None:
                kind = torch.uint8 if self.shape.experts <= 1 << 8 else torch.int16
                self._layers[layer] = chosen.detach().flatten(0, -2).to(kind)

        return hook


def _experts(router: Any) -> int:
    weight = getattr(router, "weight", None)
    return 0 if weight is None else int(weight.shape[0])


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
