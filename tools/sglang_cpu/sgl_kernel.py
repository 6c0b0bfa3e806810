"""Stand-in for SGLang's package of CPU operations, which PyPI lacks: the one its server needs here, in plain torch.

Without AMX all layers take SGLang's own pure-torch path. Nothing of the server itself is replaced.
"""

from collections.abc import Callable
from typing import Any, NoReturn


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
