"""The weights of one moment, in host memory as they are published: each rank holds its own shards, none holds them all.

    copy      between two train steps, on every rank at once: in bfloat16, 2 bytes per parameter over all ranks
    stream    later, in a thread, while training goes on: shard after shard comes to rank 0, which has one at a time

FSDP2 cuts a tensor along its first dimension, so its bytes are those of its shards, one rank's after the other's.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from learner.ranks import Channel, Ranks


class Shards:
    """This rank's part of a copy of `weights`, which may change as soon as this is made."""

    def __init__(self, weights: Mapping[str, Tensor], ranks: Ranks) -> None:
        self.ranks = ranks.size
        self._rank = ranks.rank
        self._sharded = {name for name, weight in weights.items() if isinstance(weight, DTensor)}
        self.shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
        self.dtypes = {name: published_dtype(weight) for name, weight in weights.items()}
        self._parts = {name: self._copy(name, weight) for name, weight in weights.items()}

    def stream(self, names: Sequence[str], channel: Channel) -> Iterator[Tensor]:
        """The bytes of these weights: on rank 0 as many parts of each as there are ranks, elsewhere nothing.

        Every rank names the same and goes to the end: another one waits for it.
        """
        for name in names:
            own = self._parts.pop(name)
            if self._rank == 0:
                yield own
                yield from (self._received(name, rank, channel) for rank in range(1, self.ranks))
            elif own.numel():
                channel.send(own)

    def size(self, name: str) -> int:
        """Bytes of a whole weight."""
        return math.prod(self.shapes[name]) * self.dtypes[name].itemsize

    def _copy(self, name: str, weight: Tensor) -> Tensor:
        own = weight.to_local() if isinstance(weight, DTensor) else weight
        part = (
            own.detach()
            .to("cpu", self.dtypes[name], copy=True)
            .contiguous()
            .reshape(-1)
            .view(torch.uint8)
        )
        return part[: self._bytes(name, self._rank)]

    def _received(self, name: str, rank: int, channel: Channel) -> Tensor:
        part = torch.empty(self._bytes(name, rank), dtype=torch.uint8)
        if part.numel():
            channel.receive(part, rank)
        return part

    def _bytes(self, name: str, rank: int) -> int:
        """Of a rank's part. Who is not sharded is the same everywhere: rank 0 has it."""
        size = self.size(name)
        if name not in self._sharded:
            return size if rank == 0 else 0
        rows = self.shapes[name][0]
        each = -(-rows // self.ranks)  # as torch.chunk cuts
        return size // max(1, rows) * max(0, min(each, rows - rank * each))


def published_dtype(weight: Tensor) -> torch.dtype:
    return torch.bfloat16 if weight.is_floating_point() else weight.dtype
