"""Copy the weights to host memory and stream them to rank 0, which never holds more than one shard
of another rank.

    copy      between two train steps, each rank copies its own shards in bfloat16:
              2 bytes per parameter over all ranks
    stream    later, in a thread, while training goes on, the shards go to rank 0 one by one

FSDP2 cuts a tensor along its first dimension, so its bytes are those of its shards in the order of
the ranks.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from learner.ranks.ranks import Channel, Ranks


class Shards:
    """A copy of this rank's shards of `weights`, which may change once this object exists."""

    def __init__(self, weights: Mapping[str, Tensor], ranks: Ranks) -> None:
        self.ranks = ranks.size
        self._rank = ranks.rank
        self._sharded = {name for name, weight in weights.items() if isinstance(weight, DTensor)}
        self.shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
        self.dtypes = {name: published_dtype(weight) for name, weight in weights.items()}
        self._parts = {name: self._copy(name, weight) for name, weight in weights.items()}

    def stream(self, names: Sequence[str], channel: Channel) -> Iterator[Tensor]:
        """Yield the bytes of these weights: on rank 0 one part per weight and rank, on other ranks
        nothing.

        Every rank must pass the same names and exhaust the iterator, because another rank waits for
        it.
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
        """The size of a rank's part. Weights that are not sharded are the same on all ranks; rank 0
        sends them.
        """
        size = self.size(name)
        if name not in self._sharded:
            return size if rank == 0 else 0
        rows = self.shapes[name][0]
        # torch.chunk gives every rank the quotient rounded up, and the last ones what is left.
        each = -(-rows // self.ranks)
        return size // max(1, rows) * max(0, min(each, rows - rank * each))


def published_dtype(weight: Tensor) -> torch.dtype:
    return torch.bfloat16 if weight.is_floating_point() else weight.dtype
