"""Copy the weights to host memory, from where each rank writes its part of each tensor.

    copy      between two train steps, each rank copies its own shards in bfloat16:
              2 bytes per parameter over all ranks
    pieces    later, in a thread, while training goes on, the ranks on rank 0's host write their copies; the ranks on
              other hosts send theirs to rank 0, which writes them too

FSDP2 cuts a tensor along its first dimension, so the bytes of a tensor are the bytes of its shards in the
order of the ranks.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from echo2d.learner.ranks.ranks import Channel, Ranks
from echo2d.learner.saving.host_copy import host_copy
from echo2d.learner.saving.layout import WeightPart

_MESSAGE_BYTES = (
    64 << 20
)  # a rank on another host sends at most this, or one part of a tensor, at a time

_Item = TypeVar("_Item")


class VersionTensors:
    """The tensors of a version, by name: their shapes and published dtypes.

    parts: for each tensor, the weight or the part of a weight that it is.
    """

    def __init__(self, weights: Mapping[str, Tensor], parts: Mapping[str, WeightPart]) -> None:
        self.parts = parts
        self.shapes = {
            name: part.shape(tuple(weights[part.weight].shape)) for name, part in parts.items()
        }
        self.dtypes = {name: published_dtype(weights[part.weight]) for name, part in parts.items()}

    def size(self, name: str) -> int:
        """The bytes of a whole tensor."""
        return math.prod(self.shapes[name]) * self.dtypes[name].itemsize


class Piece(NamedTuple):
    """Consecutive bytes of a tensor of a version."""

    tensor: str
    start: int  # where they begin in the tensor, in bytes
    data: Tensor  # [bytes] of uint8


class Shards:
    """A copy of this rank's shards of `weights`, which may change once this object exists."""

    def __init__(
        self, weights: Mapping[str, Tensor], tensors: VersionTensors, ranks: Ranks
    ) -> None:
        self._ranks, self._tensors = ranks, tensors
        self._rows = {
            name: len(weight) for name, weight in weights.items() if isinstance(weight, DTensor)
        }
        self._copies = {
            name: self._copy(name, weights[tensors.parts[name].weight])
            for name in self._names(ranks.rank)
        }

    def pieces(self, channel: Channel) -> Iterator[Piece]:
        """Yield the pieces that this rank writes, and free them: its own, and on rank 0 those of ranks on other hosts.

        Every rank must exhaust the iterator, because other ranks wait for it.
        """
        rank, here = self._ranks.rank, self._ranks.on_first_host
        if rank >= here:
            for names in self._messages(rank):
                channel.send(torch.cat([self._copies.pop(name) for name in names]))
            return
        # The ranks begin at different places, because a file takes the bytes of one process at a time.
        names = list(self._copies)
        first = len(names) * rank // here
        for name in (*names[first:], *names[:first]):
            yield Piece(name, self._span(name, rank)[0], self._copies.pop(name))
        for other in range(here, self._ranks.shards) if rank == 0 else ():
            for names in self._messages(other):
                yield from self._received(names, other, channel)

    def _copy(self, name: str, weight: Tensor) -> Tensor:
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        own = self._tensors.parts[name].of(local, first_row(weight))
        assert own is not None
        return host_copy(own.detach(), self._tensors.dtypes[name]).reshape(-1).view(torch.uint8)

    def _received(self, names: list[str], rank: int, channel: Channel) -> Iterator[Piece]:
        spans = [self._span(name, rank) for name in names]
        sizes = [end - start for start, end in spans]
        message = torch.empty(sum(sizes), dtype=torch.uint8)
        channel.receive(message, rank)
        for name, (start, _), data in zip(names, spans, message.split(sizes), strict=True):
            yield Piece(name, start, data)

    def _names(self, rank: int) -> list[str]:
        """The tensors of which a rank has a part that is published."""
        spans = {name: self._span(name, rank) for name in self._tensors.parts}
        return [name for name, (start, end) in spans.items() if start < end]

    def _messages(self, rank: int) -> Iterator[list[str]]:
        """The tensors whose parts a rank sends in each message."""

        def size(name: str) -> int:
            start, end = self._span(name, rank)
            return end - start

        return in_portions(self._names(rank), size, _MESSAGE_BYTES)

    def _span(self, name: str, rank: int) -> tuple[int, int]:
        """Where a rank's part of a tensor begins and ends, in bytes. A weight that is not sharded is the same on all
        ranks; it is rank 0's.
        """
        size, part, shards = self._tensors.size(name), self._tensors.parts[name], self._ranks.shards
        if part.weight not in self._rows:
            return 0, 0 if rank else size
        rows = self._rows[part.weight]
        # Ranks beyond the shards have the same shards as those before.
        first, end = (rows_before(rows, min(each, shards), shards) for each in (rank, rank + 1))
        if part.expert is not None:
            return 0, size if first <= part.expert < end else 0
        return size // max(1, rows) * first, size // max(1, rows) * end


def in_portions(
    items: Iterable[_Item], size_of: Callable[[_Item], int], most: int
) -> Iterator[list[_Item]]:
    """The items in their order, in lists whose sizes add up to at most `most`, or of one item."""
    portion: list[_Item] = []
    size = 0
    for item in items:
        if portion and size + size_of(item) > most:
            yield portion
            portion, size = [], 0
        portion.append(item)
        size += size_of(item)
    if portion:
        yield portion


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
    shards = mesh.ndim - 1  # the last dimension of the mesh; see Ranks.mesh
    return rows_before(len(weight), mesh.get_local_rank(shards), mesh.size(shards))


def published_dtype(weight: Tensor) -> torch.dtype:
    return torch.bfloat16 if weight.is_floating_point() else weight.dtype
