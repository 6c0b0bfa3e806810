"""Keeps AdamW's moments in host memory between optimizer steps.

    between two steps   the moments of all weights are in host memory (pinned, with a GPU); the device holds none
    in a step           for a few weights at a time: moments to the device, AdamW's step, moments back

AdamW computes what it computes with all moments on the device, so the weights are the same, bit for bit. A checkpoint
reads the moments from host memory (`on_host`). The method is that of CPU offload as prime-rl and verl have it.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from echo2d.learner.ranks.ranks import own_shard
from echo2d.learner.saving.shards import in_portions


class HostMoments:
    """The moments of one AdamW optimizer.

    part_bytes_max: how much of the moments may be on the device at a time, in bytes of a rank's shards. copies: False
    for a plan, whose tensors have no numbers.
    """

    names = "exp_avg", "exp_avg_sq"

    def __init__(
        self, optimizer: torch.optim.AdamW, *, part_bytes_max: int = 1 << 30, copies: bool = True
    ) -> None:
        self._optimizer = optimizer
        self._part_bytes_max, self._copies = part_bytes_max, copies
        self._host: dict[tuple[Tensor, str], Tensor] = {}
        self.bytes = sum(map(_bytes, self._weights()))  # of all moments
        # The most that is on the device at a time.
        self.part_bytes = max(
            (sum(map(_bytes, part)) for part in self._parts(self._weights())), default=0
        )
        for weight in self._weights():
            self._begin(weight)
            self._store(weight)

    def step(self) -> None:
        """AdamW's step. The gradients are dropped, each as soon as it is applied."""
        gradients = {weight: weight.grad for weight in self._weights() if weight.grad is not None}
        for weight in gradients:
            weight.grad = None
        for part in self._parts(list(gradients)):
            for weight in part:
                self._load(weight)
                weight.grad = gradients.pop(weight)
            self._optimizer.step()
            for weight in part:
                weight.grad = None
                self._store(weight)

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """In the block, the optimizer's state has the moments in host memory, as this rank's shards."""
        if any(own_shard(weight).is_cuda for weight in self._weights()):
            # The CPU does not wait for the copies of `_store` otherwise.
            torch.cuda.synchronize()
        kept: list[tuple[dict[str, Any], str, Tensor]] = []
        for weight in self._weights():
            state = self._optimizer.state[weight]
            for name in self.names:
                kept.append((state, name, state[name]))
                state[name] = _like(state[name], self._host[weight, name])
        try:
            yield
        finally:
            for state, name, moment in kept:
                state[name] = moment

    def take(self) -> None:
        """Take over moments that were loaded into the optimizer."""
        for weight in self._weights():
            state = self._optimizer.state[weight]
            for name in self.names:
                # On a CPU the loaded moments may be the host's own, which `_store` would free.
                state[name] = state[name].clone()
            self._store(weight)

    def _weights(self) -> Iterator[Tensor]:
        for group in self._optimizer.param_groups:
            yield from group["params"]

    def _parts(self, weights: Iterable[Tensor]) -> Iterator[list[Tensor]]:
        return in_portions({weight: _bytes(weight) for weight in weights}, self._part_bytes_max)

    def _begin(self, weight: Tensor) -> None:
        """The state with which AdamW begins: no step, and moments of zero."""
        fused = bool(self._optimizer.defaults["fused"])
        step = torch.zeros((), device=own_shard(weight).device if fused else "cpu")
        self._optimizer.state[weight] = {
            "step": step,
            **{name: torch.zeros_like(weight) for name in self.names},
        }

    def _store(self, weight: Tensor) -> None:
        """Copy the moments to host memory, and free them on the device."""
        for name in self.names:
            moment = own_shard(self._optimizer.state[weight][name])
            if self._copies:
                host = self._host.get((weight, name))
                if host is None:
                    host = torch.empty_like(moment, device="cpu", pin_memory=moment.is_cuda)
                    self._host[weight, name] = host
                # Later operations on the device, which may reuse the moment's memory, wait for this copy.
                host.copy_(moment, non_blocking=moment.is_cuda)
            moment.untyped_storage().resize_(0)

    def _load(self, weight: Tensor) -> None:
        for name in self.names:
            moment = own_shard(self._optimizer.state[weight][name])
            moment.untyped_storage().resize_(moment.numel() * moment.element_size())
            if self._copies:
                moment.copy_(self._host[weight, name], non_blocking=moment.is_cuda)


def _like(moment: Tensor, host: Tensor) -> Tensor:
    """The shard in host memory, as part of the whole tensor that the moment is part of."""
    if not isinstance(moment, DTensor):
        return host
    return DTensor(host, moment._spec, requires_grad=False)  # type: ignore[no-untyped-call]  # noqa: SLF001


def _bytes(weight: Tensor) -> int:
    """The size of both moments of this rank's shard."""
    return 2 * own_shard(weight).nbytes
