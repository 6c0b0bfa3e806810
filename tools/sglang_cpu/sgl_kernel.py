"""A stand-in for SGLang's package of CPU operations, which PyPI lacks, with the two operations that the server needs.

Without AMX all layers use SGLang's own pure-torch code. No part of the server itself is replaced.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch

_operators = torch.library.Library("sgl_kernel", "FRAGMENT")  # type: ignore[no-untyped-call]
_operators.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor columns) -> Tensor")  # type: ignore[no-untyped-call]


def _murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> Any:
    """Run SGLang's own Triton kernel in Triton's interpreter."""
    from sglang.kernels.ops.sampling.murmur_hash import (  # type: ignore[import-not-found]
        murmur_hash32_kernel,
    )

    rows, width = len(seed), len(columns)
    hashes = torch.empty((rows, width), dtype=torch.uint32)
    grid = (rows, -(-width // _BLOCK))
    murmur_hash32_kernel[grid](seed, positions, columns, hashes, rows, width, BLOCK_SIZE=_BLOCK)
    return hashes


_BLOCK = 1024
_operators.impl("murmur_hash32_cpu", _murmur_hash32, "CPU")  # type: ignore[no-untyped-call]


def assign_req_to_token_pool_cpu(
    req_pool_indices: Any,
    req_to_token: Any,
    start_offset: Any,
    end_offset: Any,
    out_cache_loc: Any,
    _: int,
) -> None:
    """Row r of the table gets the next cache locations at its columns [start, end)."""
    taken = 0
    ranges = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for row, start, end in ranges:
        req_to_token[row, start:end] = out_cache_loc[taken : taken + end - start].to(
            req_to_token.dtype
        )
        taken += end - start


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if not name.endswith("_cpu"):
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(f"{name} is in the real package only")

    return missing
