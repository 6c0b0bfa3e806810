"""AdamW's two moments of each weight where they take less of a device's memory: `HostMoments` and `SmallMoments`.

A checkpoint has the moments in float32 wherever they are, so a learner with another learner.moments can go on from it.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from echo2d.client import OperatorFault
from echo2d.extras import install_command
from echo2d.learner.config import LearnerConfig
from echo2d.learner.ranks.ranks import own_shard
from echo2d.learner.saving.shards import in_portions


class Moments(ABC):
    """The moments of one optimizer."""

    names = "exp_avg", "exp_avg_sq"

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def step(self) -> None:
        """AdamW's step. HostMoments drops the gradients, each as soon as it is applied."""
        self._optimizer.step()

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """In the block, the optimizer's state has the moments in host memory in float32, as this rank's shards."""
        if any(own_shard(weight).is_cuda for weight in self._weights()):
            # The CPU does not wait for copies otherwise.
            torch.cuda.synchronize()
        kept: list[tuple[dict[str, Any], str, Tensor]] = []
        for weight in self._weights():
            state = self._optimizer.state[weight]
            for name in self.names:
                kept.append((state, name, state[name]))
                state[name] = _like(state[name], self._kept(weight, name))
        try:
            yield
        finally:
            for state, name, moment in kept:
                state[name] = moment

    @abstractmethod
    def take(self) -> None:
        """Take over float32 moments that were loaded into the optimizer."""

    @abstractmethod
    def _kept(self, weight: Tensor, name: str) -> Tensor:
        """This rank's shard of a moment, in host memory in float32."""

    def _weights(self) -> Iterator[Tensor]:
        for group in self._optimizer.param_groups:
            yield from group["params"]


class SmallMoments(Moments):
    """Moments of 8 bits, with a float32 scale for each 256 of them (torchao's AdamW8bit, after arXiv 2110.02861).

    Its weights differ from those of float32 moments. Shards of fewer than 4,096 numbers, or of a number that 256 does
    not divide, keep float32.
    """

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self._new = optimizer._new_buffer  # noqa: SLF001 - torchao has no other way to make one
        for weight in self._weights():
            zeros = {name: self._new(weight, name == "exp_avg") for name in self.names}
            self._optimizer.state[weight] = {"step": torch.tensor(0.0), **zeros}

    def take(self) -> None:
        for weight in self._weights():
            state = self._optimizer.state[weight]
            for name in self.names:
                loaded, state[name] = state[name], self._new(weight, name == "exp_avg")
                own_shard(state[name]).copy_(own_shard(loaded))

    def _kept(self, weight: Tensor, name: str) -> Tensor:
        moment: Any = own_shard(self._optimizer.state[weight][name])
        whole: Tensor = moment.dequantize() if hasattr(moment, "dequantize") else moment
        return whole.cpu()


class HostMoments(Moments):
    """Moments in host memory.

        between two steps   the moments of all weights are in host memory (pinned, with a GPU); the device holds none
        in a step           for a few weights at a time: moments to the device, AdamW's step, moments back

    AdamW computes what it computes with all moments on the device, so the weights are the same, bit for bit. The method
    is that of CPU offload as prime-rl and verl have it.

    part_bytes_max: how much of the moments may be on the device at a time, in bytes of a rank's shards. copies: False
    for a plan, whose tensors have no numbers.
    """

    def __init__(
        self, optimizer: torch.optim.AdamW, *, part_bytes_max: int = 1 << 30, copies: bool = True
    ) -> None:
        super().__init__(optimizer)
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

    def take(self) -> None:
        for weight in self._weights():
            state = self._optimizer.state[weight]
            for name in self.names:
                # On a CPU the loaded moments may be the host's own, which `_store` would free.
                state[name] = state[name].clone()
            self._store(weight)

    def _kept(self, weight: Tensor, name: str) -> Tensor:
        return self._host[weight, name]

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


def adamw(
    trained: Sequence[Tensor], config: LearnerConfig, *, on_gpu: bool
) -> tuple[torch.optim.Optimizer, Moments | None]:
    """The optimizer of the weights that are trained; None: it has its moments itself.

    OperatorFault: learner.moments needs torchao, which is not installed.
    """
    settings: Any = {
        "lr": config.lr,
        "betas": config.betas,
        "weight_decay": config.weight_decay,
    }
    if config.moments == "8bit":
        try:
            from torchao.optim import AdamW8bit  # type: ignore[import-not-found,import-untyped,unused-ignore]
        except ImportError as error:
            raise OperatorFault(
                f"learner.moments: 8bit needs torchao: {install_command('torchao')}"
            ) from error
        small = AdamW8bit(trained, **settings)
        return small, SmallMoments(small)
    optimizer = torch.optim.AdamW(trained, fused=on_gpu, **settings)
    return optimizer, HostMoments(optimizer) if config.moments == "host" else None


def _like(moment: Tensor, host: Tensor) -> Tensor:
    """The shard in host memory, as part of the whole tensor that the moment is part of."""
    if not isinstance(moment, DTensor):
        return host
    return DTensor(host, moment._spec, requires_grad=False)  # type: ignore[no-untyped-call]  # noqa: SLF001


def _bytes(weight: Tensor) -> int:
    """The size of both moments of this rank's shard."""
    return 2 * own_shard(weight).nbytes
