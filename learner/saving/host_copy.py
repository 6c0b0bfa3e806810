"""Copy a tensor to ordinary host memory, from a GPU through two pinned buffers.

A copy from a GPU into pinned memory runs at the speed of the bus, a copy into ordinary memory at a fraction
of that. But pinned memory is scarce: torch rounds each block up to a power of two and keeps it. So there are
two small pinned buffers: a piece is copied into one while the piece before it is copied out of the other.
"""

from functools import cache

import torch
from torch import Tensor


def host_copy(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous copy in host memory, of this dtype, complete when this returns."""
    if not weight.is_cuda:
        return weight.to("cpu", dtype, copy=True).contiguous()
    source = weight.to(dtype).contiguous()
    host = torch.empty(source.shape, dtype=dtype)
    with torch.cuda.device(source.device):
        copy_staged(_bytes(source), _bytes(host), _stages())
    return host


def copy_staged(source: Tensor, host: Tensor, stages: tuple[Tensor, Tensor]) -> None:
    """Copy bytes through two buffers of equal length in turn. All tensors are flat and of uint8."""
    under_way: tuple[Tensor, Tensor, torch.cuda.Event | None] | None = None
    for turn, start in enumerate(range(0, len(source), len(stages[0]))):
        piece = source[start : start + len(stages[0])]
        stage = stages[turn % 2][: len(piece)]
        stage.copy_(piece, non_blocking=True)
        arrived = torch.cuda.current_stream().record_event() if source.is_cuda else None
        _finish(under_way)
        under_way = host[start : start + len(piece)], stage, arrived
    _finish(under_way)


def _finish(copy: "tuple[Tensor, Tensor, torch.cuda.Event | None] | None") -> None:
    if copy is not None:
        host, stage, arrived = copy
        if arrived is not None:
            arrived.synchronize()
        host.copy_(stage)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@cache
def _stages() -> tuple[Tensor, Tensor]:
    """The two buffers, of 64 MiB each. They are made once, and the process keeps them."""
    first, second = (torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    return first, second
