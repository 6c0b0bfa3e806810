"""Copy the weights to host memory and stream them to rank 0, which never holds more than one shard
of another rank.

    copy      between two train steps, each rank copies its own shards in bfloat16:
              2 bytes per parameter over all ranks
    stream    later, in a thread, while training goes on, the shards go to rank 0 one by one

FSDP2 cuts a tensor along its first dimension, so the bytes of a tensor are the bytes of its shards in the
order of the ranks.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from echo2d.learner.ranks.ranks import Channel, Ranks, own_shard
from echo2d.learner.saving.host_copy import host_copy
from echo2d.learner.saving.layout import WeightPart


class VersionTensors:
    """The tensors of a version, by name: their shapes and published dtypes.

    parts: for each tensor, the weight or the part of a weight that it is.
    """

    ranks = 1  # in how many parts each tensor is written

    def __init__(self, weights: Mapping[str, Tensor], parts: Mapping[str, WeightPart]) -> None:
        self.shapes = {
            name: part.shape(tuple(weights[part.weight].shape)) for name, part in parts.items()
        }
        self.dtypes = {name: published_dtype(weights[part.weight]) for name, part in parts.items()}

    def size(self, name: str) -> int:
        """The bytes of a whole tensor."""
        return math.prod(self.shapes[name]) * self.dtypes[name].itemsize


class Shards(VersionTensors):
    """A copy of this rank's shards of `weights`, which may change once this object exists.

    parts: for each tensor of a version, by name, the weight or the part of a weight that it is.
    """

    def __init__(
        self, weights: Mapping[str, Tensor], parts: Mapping[str, WeightPart], ranks: Ranks
    ) -> None:
        super().__init__(weights, parts)
        self.ranks = ranks.size
        self._rank = ranks.rank
        self._parts = dict(parts)
        self._sharded = {name for name, weight in weights.items() if isinstance(weight, DTensor)}
        self._rows = {name: len(weight) if weight.ndim else 1 for name, weight in weights.items()}
        self._copies = {
            name: self._copy(name, weights[part.weight]) for name, part in parts.items()
        }

    def stream(self, names: Sequence[str], channel: Channel) -> Iterator[Tensor]:
        """Yield the bytes of these tensors: on rank 0 one part per tensor and rank, on other ranks
        nothing.

        Every rank must pass the same names and exhaust the iterator, because other ranks wait for it.
        """
        for name in names:
            own = self._copies.pop(name)
            if self._rank == 0:
                yield own
                yield from (self._received(name, rank, channel) for rank in range(1, self.ranks))
            elif own.numel():
                channel.send(own)

    def _copy(self, name: str, weight: Tensor) -> Tensor:
        local = own_shard(weight)
        own = self._parts[name].of(local, first_row(weight))
        if own is None:
            own = local[:0]
        copy = host_copy(own.detach(), self.dtypes[name])
        return copy.reshape(-1).view(torch.uint8)[: self._bytes(name, self._rank)]

    def _received(self, name: str, rank: int, channel: Channel) -> Tensor:
        part = torch.empty(self._bytes(name, rank), dtype=torch.uint8)
        if part.numel():
            channel.receive(part, rank)
        return part

    def _bytes(self, name: str, rank: int) -> int:
        """The size of a rank's part. Weights that are not sharded are the same on all ranks; rank 0
        yields its own.
        """
        size, part = self.size(name), self._parts[name]
        if part.weight not in self._sharded:
            return size if rank == 0 else 0
        rows = self._rows[part.weight]
        first, end = (rows_before(rows, each, self.ranks) for each in (rank, rank + 1))
        if part.expert is not None:
            return size if first <= part.expert < end else 0
        return size // max(1, rows) * (end - first)


def rows_before(rows: int, rank: int, ranks: int) -> int:
    """How many rows of a sharded weight the ranks before this one have.

    torch.chunk gives every rank the quotient rounded up, and the last ranks the remaining rows.
    """
    return min(rows, rank * -(-rows // ranks))


def first_row(weight: Tensor) -> int:
    """The row of the weight with which this rank's shard begins."""
    if not isinstance(weight, DTensor):
        return 0
    mesh = weight.device_mesh
    return rows_before(len(weight), mesh.get_local_rank(), mesh.size())


def published_dtype(weight: Tensor) -> torch.dtype:
    return torch.bfloat16 if weight.is_floating_point() else weight.dtype
