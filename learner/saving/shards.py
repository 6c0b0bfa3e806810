"""Copy the weights to host memory, from where each rank writes its part of each tensor.

    copy      between two train steps, each rank copies its own shards in bfloat16:
              2 bytes per parameter over all ranks. If no training goes on, each tensor is copied when it is written
    pieces    later, in a thread, while training goes on, the ranks on rank 0's host write their copies; the ranks on
              other hosts send theirs to rank 0, which writes them too

FSDP2 cuts a tensor along its first dimension, so the bytes of a tensor are the bytes of its shards in the
order of the ranks.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from echo2d.learner.ranks.ranks import Channel, Ranks, own_shard
from echo2d.learner.saving.host_copy import host_copy
from echo2d.learner.saving.layout import WeightPart


class VersionTensors:
    """The tensors of a version, by name: their shapes and dtypes.

    parts: for each tensor, the weight or the part of a weight that it is. dtype_of: the dtype in which a weight is
    written.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        parts: Mapping[str, WeightPart],
        dtype_of: Callable[[Tensor], torch.dtype] | None = None,
    ) -> None:
        self.parts = parts
        self.shapes = {
            name: part.shape(tuple(weights[part.weight].shape)) for name, part in parts.items()
        }
        dtype_of = dtype_of or published_dtype
        self.dtypes = {name: dtype_of(weights[part.weight]) for name, part in parts.items()}

    def size(self, name: str) -> int:
        """The bytes of a whole tensor."""
        return math.prod(self.shapes[name]) * self.dtypes[name].itemsize


class Piece(NamedTuple):
    """Consecutive bytes of a tensor of a version."""

    tensor: str
    start: int  # where they begin in the tensor, in bytes
    data: Tensor  # [bytes] of uint8


class Shards:
    """A copy of this rank's shards of `weights`, which may change once this object exists.

    copied: False: nothing is copied before it is written, and the weights must not change until then.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        tensors: VersionTensors,
        ranks: Ranks,
        *,
        copied: bool = True,
    ) -> None:
        self._ranks, self._tensors, self._weights = ranks, tensors, weights
        sharded = {name for name, each in weights.items() if isinstance(each, DTensor)}
        self._rows = {name: len(weights[name]) for name in sharded}
        own = self._spans(ranks.rank) if copied else ()
        self._copies = {name: self._copy(name) for name in own}
        if copied:
            self._weights = {}

    def pieces(self, channel: Channel, message_bytes: int = 64 << 20) -> Iterator[Piece]:
        """Yield the pieces that this rank writes, and free them: its own, and on rank 0 those of ranks on other hosts.

        Every rank must exhaust the iterator, because other ranks wait for it. message_bytes: the most that a rank sends
        at a time, unless its part of one tensor is larger.
        """
        rank, here = self._ranks.rank, self._ranks.on_first_host
        spans = self._spans(rank)
        if rank >= here:
            for names in in_portions(_sizes(spans), message_bytes):
                channel.send(torch.cat([self._take(name) for name in names]))
            return
        # The ranks begin at different places, because a file takes the bytes of one process at a time.
        names = list(spans)
        first = len(names) * rank // here
        for name in (*names[first:], *names[:first]):
            yield Piece(name, spans[name].start, self._take(name))
        for other in range(here, self._ranks.shards) if rank == 0 else ():
            spans = self._spans(other)
            for names in in_portions(_sizes(spans), message_bytes):
                sizes = [len(spans[name]) for name in names]
                message = torch.empty(sum(sizes), dtype=torch.uint8)
                channel.receive(message, other)
                starts = (spans[name].start for name in names)
                yield from map(Piece, names, starts, torch.split(message, sizes))

    def _take(self, name: str) -> Tensor:
        return self._copies.pop(name) if name in self._copies else self._copy(name)

    def _copy(self, name: str) -> Tensor:
        weight = self._weights[self._tensors.parts[name].weight]
        local = own_shard(weight)
        own = self._tensors.parts[name].of(local, first_row(weight))
        assert own is not None
        return host_copy(own.detach(), self._tensors.dtypes[name]).reshape(-1).view(torch.uint8)

    def _spans(self, rank: int) -> dict[str, range]:
        """The bytes that a rank publishes of each tensor; tensors of which it publishes none are left out."""
        spans = {name: self._span(name, rank) for name in self._tensors.parts}
        return {name: span for name, span in spans.items() if span}

    def _span(self, name: str, rank: int) -> range:
        size, part, shards = self._tensors.size(name), self._tensors.parts[name], self._ranks.shards
        if part.weight not in self._rows:
            # All ranks have the same.
            return range(0 if rank else size)
        rows = self._rows[part.weight]
        # Each rank from `shards` on has the same shards as one of the first, and publishes none.
        first, end = (rows_before(rows, min(each, shards), shards) for each in (rank, rank + 1))
        if part.expert is not None:
            return range(size if first <= part.expert < end else 0)
        return range(size // max(1, rows) * first, size // max(1, rows) * end)


def _sizes(spans: Mapping[str, range]) -> dict[str, int]:
    return {name: len(span) for name, span in spans.items()}


def in_portions(sizes: Mapping[Any, int], most: int) -> Iterator[list[Any]]:
    """The keys in their order, in lists whose sizes add up to at most `most`, or of one key."""
    portion: list[Any] = []
    filled = 0
    for key, size in sizes.items():
        if portion and filled + size > most:
            yield portion
            portion, filled = [], 0
        portion.append(key)
        filled += size
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
