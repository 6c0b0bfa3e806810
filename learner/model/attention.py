"""Attention within the pieces of a row: products between tokens of different answers are never computed.

A row holds the answers of a micro-batch, one after the other. `Pieces` says which tokens each of them reads: its
context, if it has one (a copy of its prompt that several answers share), and itself, up to the present token.
With CUDA and 16-bit numbers one call of a varlen flash-attention kernel computes a whole row. Elsewhere pieces of
similar length go through SDPA together, padded to the longest of them. Pieces after a context, or longer than the
window, are cut into blocks of queries, so that hardly any unused pair is computed.

transformers calls `attend` in every layer of a model whose attention is NAME.

Suffixes of names: t = tokens of the row, h = heads, d = head size, p = pieces, c = pieces of a call, q = their
queries, k = their keys.
"""

import contextlib
import functools
import importlib
import inspect
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from echo2d.learner.batch.packing import Pieces
from echo2d.learner.ranks.row_ranks import RowRanks

NAME = "echo2d_pieces"
# Queries in a block. Larger blocks need fewer calls; smaller blocks compute fewer unused pairs.
QUERIES = 256
WITHOUT = ("softcap", "s_aux", "position_bias", "cache")  # features that `attend` does not have


class UnknownAttentionError(ValueError):
    """The model's attention has a feature that `attend` does not have."""


def register() -> None:
    """Make NAME known to transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    pieces: "AttentionPlans | None" = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention of one layer, as transformers calls it: [1, h, t, d] to [1, t, h, d].

    pieces: None: every row is a piece. UnknownAttentionError: the layer needs a feature that this function lacks.
    """
    if attention_mask is not None or any(others.get(name) is not None for name in WITHOUT):
        raise UnknownAttentionError(f"{type(module).__name__} needs a mask, a soft cap or sinks")
    if pieces is None:
        pieces = AttentionPlans.of_rows(query.shape[0], query.shape[2])
    rows = query.shape[0]
    query_thd, key_thd, value_thd = (
        each.transpose(1, 2).flatten(0, 1) for each in (query, key, value)
    )
    settings = AttentionSettings(scaling, dropout, sliding_window)
    found_thd = pieces.run(query_thd, key_thd, value_thd, settings)
    return found_thd.view(rows, -1, *found_thd.shape[1:]), None


@dataclass(frozen=True, slots=True)
class AttentionSettings:
    """The settings of one layer."""

    scaling: float | None
    dropout: float
    window: int | None  # how many tokens a query sees, including itself; None: all before it


@dataclass(frozen=True, slots=True)
class _Call:
    """Pieces that go through SDPA together."""

    # Indices in the row.
    queries: NDArray[np.int64]  # [c, q]
    keys: NDArray[np.int64]  # [c, k]
    mask: NDArray[np.bool_] | None  # [q, k]; None: causal

    @property
    def pairs(self) -> int:
        """Pairs of query and key that are computed. A kernel skips pairs that a causal mask hides."""
        pieces, queries = self.queries.shape
        each = queries * (queries + 1) // 2 if self.mask is None else self.mask.size
        return int(pieces * each)


class AttentionPlans:
    """How the pieces of a row are computed, for each window that a layer has.

    device: that of the row, if a kernel may be used. The kernel's arguments are made here, because compiled layers
    could not make them. row_ranks: the ranks that share the row; `run` then gets this rank's slice of it.
    """

    def __init__(
        self, pieces: Pieces, device: torch.device | None = None, row_ranks: RowRanks | None = None
    ) -> None:
        self._pieces = pieces
        self._row_ranks = row_ranks or RowRanks()
        self._made: dict[object, Any] = {}
        self._varlen: tuple[_Kernel, VarlenRow] | None = None
        if device is not None and device.type == "cuda" and (kernel := _kernel()):
            self._varlen = kernel, _varlen(pieces, device)

    @staticmethod
    @functools.lru_cache(maxsize=8)
    def of_rows(rows: int, tokens: int) -> "AttentionPlans":
        """Every row is a piece."""
        starts_p = np.arange(rows, dtype=np.int64) * tokens
        zeros_p = np.zeros(rows, dtype=np.int64)
        return AttentionPlans(Pieces(starts_p, np.full(rows, tokens), zeros_p, zeros_p))

    def run(
        self, query_thd: Tensor, key_thd: Tensor, value_thd: Tensor, settings: AttentionSettings
    ) -> Tensor:
        """The output [t, h, d] for every token of the row, or of this rank's slice."""
        row_ranks = self._row_ranks
        query_thd, key_thd, value_thd = map(row_ranks.by_heads, (query_thd, key_thd, value_thd))
        return row_ranks.by_tokens(self._run(query_thd, key_thd, value_thd, settings))

    def _run(
        self, query_thd: Tensor, key_thd: Tensor, value_thd: Tensor, settings: AttentionSettings
    ) -> Tensor:
        # Flash-attention takes 16-bit numbers and heads of at most 256 channels.
        narrow = query_thd.dtype != torch.float32 and query_thd.shape[2] <= 256
        if self._varlen is not None and narrow and not settings.dropout:
            return _run_varlen(*self._varlen, query_thd, key_thd, value_thd, settings)
        found: Tensor = self._run_sdpa(query_thd, key_thd, value_thd, settings)
        return found

    def pairs(self, window: int | None = None) -> int:
        """Pairs of query and key that SDPA computes."""
        return sum(call.pairs for call in _calls(self._pieces, window))

    # The calls differ from row to row, and each of them would be compiled.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _run_sdpa(
        self, query_thd: Tensor, key_thd: Tensor, value_thd: Tensor, settings: AttentionSettings
    ) -> Tensor:
        calls, back_t = self._on_device(settings.window, query_thd.device)
        grouped = query_thd.shape[1] != key_thd.shape[1]
        found = []
        for queries, keys, mask_qk in calls:
            out_chqd = functional.scaled_dot_product_attention(
                _taken(query_thd, queries),
                _taken(key_thd, keys),
                _taken(value_thd, keys),
                attn_mask=mask_qk,
                dropout_p=settings.dropout,
                is_causal=mask_qk is None,
                scale=settings.scaling,
                enable_gqa=grouped,
            )
            found.append(out_chqd.transpose(1, 2).flatten(0, 1))
        whole = found[0] if len(found) == 1 else torch.cat(found)
        return whole if back_t is None else whole.index_select(0, back_t)

    def _on_device(self, window: int | None, device: torch.device) -> Any:
        """The calls, with tensors in place of arrays, and what `_way_back` returns for them."""
        if (made := self._made.get((window, device))) is None:
            calls = _calls(self._pieces, window)
            made = self._made[window, device] = (
                [
                    (
                        _places(call.queries, device),
                        _places(call.keys, device),
                        None if call.mask is None else torch.from_numpy(call.mask).to(device),
                    )
                    for call in calls
                ],
                _way_back(calls, device),
            )
        return made


def _calls(pieces: Pieces, window: int | None) -> list[_Call]:
    """The calls of SDPA for a row."""
    whole, blocks = [], []
    for start, tokens, context_start, context in pieces.rows():
        if not context and (window is None or tokens <= window):
            whole.append((start, tokens))
            continue
        context_k = context_start + np.arange(context)
        for first in range(0, tokens, QUERIES):
            end = min(tokens, first + QUERIES)
            seen = 0 if window is None else max(0, context + first + 1 - window)
            keys_k = np.concatenate([context_k, start + np.arange(end)])[seen:]
            blocks.append((start + np.arange(first, end), keys_k))
    calls = [
        _Call(queries, queries, None)
        for alike in _alike(whole, key=lambda piece: piece[1])
        for queries in [_padded([start + np.arange(tokens) for start, tokens in alike])]
    ]
    # All blocks of a call have the same number of keys before them, so that one mask fits all.
    by_before: dict[int, list[Any]] = defaultdict(list)
    for block in blocks:
        by_before[len(block[1]) - len(block[0])].append(block)
    for found in by_before.values():
        for alike in _alike(found, key=lambda block: len(block[0])):
            queries, keys = (_padded([block[side] for block in alike]) for side in (0, 1))
            calls.append(_Call(queries, keys, _mask(queries.shape[1], keys.shape[1], window)))
    return calls


def _alike(items: Sequence[Any], *, key: Callable[[Any], int]) -> list[list[Any]]:
    """Group items of similar length, longest first."""
    found: list[list[Any]] = []
    for item in sorted(items, key=key, reverse=True):
        longest = key(found[-1][0]) if found else 0
        # An item joins a group if it has at least 80 % of the longest item's length, or is at most 8 shorter.
        if found and key(item) >= min(0.8 * longest, longest - 8):
            found[-1].append(item)
        else:
            found.append([item])
    return found


def _padded(places: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Rows of one length. Padding repeats the last index; no query of the row itself sees it."""
    width = max(map(len, places))
    return np.stack([np.pad(each, (0, width - len(each)), mode="edge") for each in places])


def _mask(queries: int, keys: int, window: int | None) -> NDArray[np.bool_]:
    """The mask [q, k]; the last query and the last key are the same token."""
    back_qk = (keys - queries + np.arange(queries))[:, None] - np.arange(keys)
    return (back_qk >= 0) & (back_qk < (window or keys))


def _places(places: NDArray[np.int64], device: torch.device) -> Any:
    """The indices as a slice if they are one run of tokens, else as a tensor."""
    if len(places) == 1 and (np.diff(places[0]) == 1).all():
        return slice(int(places[0, 0]), int(places[0, -1]) + 1)
    return torch.from_numpy(places).to(device)


def _taken(values_thd: Tensor, places: Any) -> Tensor:
    """These tokens [c, h, q, d]."""
    if isinstance(places, slice):
        return values_thd[places].transpose(0, 1)[None]
    taken = values_thd.index_select(0, places.flatten())
    return taken.view(*places.shape, *values_thd.shape[1:]).transpose(1, 2)


def _way_back(calls: Sequence[_Call], device: torch.device) -> Tensor | None:
    """The index [t] of each token's output among the outputs of all calls. None: they are in order."""
    places = np.concatenate([call.queries.flatten() for call in calls])
    # Padding repeats a piece's last index, and `unique` finds the first of the equal ones, which is the token itself.
    _, back_t = np.unique(places, return_index=True)
    if (back_t == np.arange(len(places))[: len(back_t)]).all() and len(back_t) == len(places):
        return None
    return torch.from_numpy(back_t).to(device)


@dataclass(frozen=True, slots=True)
class VarlenRow:
    """A row in the form that varlen kernels take."""

    keys_k: Tensor | None  # indices of all keys, piece by piece; None: the row's tokens in order
    # [p + 1], int32: where the queries, and the keys, of each piece begin.
    query_bounds: Tensor
    key_bounds: Tensor
    # The most queries, and the most keys, of any piece.
    queries_longest: int
    keys_longest: int


_Kernel = Callable[[Tensor, Tensor, Tensor, VarlenRow, AttentionSettings], Tensor]


def _run_varlen(
    kernel: _Kernel,
    row: VarlenRow,
    query_thd: Tensor,
    key_thd: Tensor,
    value_thd: Tensor,
    settings: AttentionSettings,
) -> Tensor:
    if row.keys_k is not None:
        key_thd, value_thd = (each.index_select(0, row.keys_k) for each in (key_thd, value_thd))
    return kernel(query_thd, key_thd, value_thd, row, settings)


def _varlen(pieces: Pieces, device: torch.device) -> VarlenRow:
    keys = [
        np.concatenate([context_start + np.arange(context), start + np.arange(tokens)])
        for start, tokens, context_start, context in pieces.rows()
    ]
    queries_p, keys_p = pieces.tokens_p, pieces.tokens_p + pieces.context_tokens_p
    query_bounds, key_bounds = (
        torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)).to(device)
        for lengths in (queries_p, keys_p)
    )
    shared = bool(pieces.context_tokens_p.any())
    keys_k = torch.from_numpy(np.concatenate(keys)).to(device) if shared else None
    return VarlenRow(keys_k, query_bounds, key_bounds, int(queries_p.max()), int(keys_p.max()))


@functools.cache
def _kernel() -> _Kernel | None:
    """The varlen kernel of this installation: that of flash-attention 3, which needs a Hopper GPU, or 2, if one of them
    is installed, else torch's copy of the latter.
    """
    hopper = torch.cuda.get_device_capability()[0] == 9
    for library in ("flash_attn_interface", "flash_attn") if hopper else ("flash_attn",):
        with contextlib.suppress(ImportError, AttributeError):
            found = importlib.import_module(library)
            return _calling(found.flash_attn_varlen_func, "softmax_scale", causal=True)
    return _torchs_kernel()


def _torchs_kernel() -> _Kernel | None:
    """The varlen kernel of torch; None: it has none that can be used.

    It has windows since torch 2.11. Since 2.12 it needs a flag to take fewer heads of keys than of queries.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    if "window_size" not in known:
        return None
    return _calling(varlen_attn, "scale", **({"enable_gqa": True} if "enable_gqa" in known else {}))


def _calling(varlen: Callable[..., Any], scale: str, **options: Any) -> _Kernel:
    """The kernel that calls this function. scale: the name of its argument for the scaling."""

    def run(
        query: Tensor, key: Tensor, value: Tensor, row: VarlenRow, settings: AttentionSettings
    ) -> Tensor:
        more = {**options, scale: settings.scaling, "window_size": _window(settings)}
        found = varlen(query, key, value, *_bounds(row), **more)
        # Early releases of flash-attention 3 also return the sums of the softmax.
        output: Tensor = found[0] if isinstance(found, tuple) else found
        return output

    return run


def _bounds(row: VarlenRow) -> tuple[Tensor, Tensor, int, int]:
    return row.query_bounds, row.key_bounds, row.queries_longest, row.keys_longest


def _window(settings: AttentionSettings) -> tuple[int, int]:
    """How many tokens before and after its own a query sees; -1: all of them."""
    return (-1 if settings.window is None else settings.window - 1, 0)
