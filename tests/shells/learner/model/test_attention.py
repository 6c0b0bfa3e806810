"""Attention in pieces, compared with one dense mask over the whole row."""

import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from echo2d.learner.batch.packing import PackedAnswer, Pieces, micro_batches
from echo2d.learner.model import attention
from echo2d.learner.model.attention import (
    AttentionPlans,
    AttentionSettings,
    UnknownAttentionError,
    VarlenRow,
    _run_varlen,
    _varlen,
    attend,
)

HEADS, KEY_HEADS, SIZE = 4, 2, 8
# Each bundle: tokens of its shared prompt (0: none), and tokens of each answer.
BUNDLES = st.lists(
    st.tuples(st.integers(0, 40), st.lists(st.integers(1, 40), min_size=1, max_size=4)),
    min_size=1,
    max_size=5,
)


def pieces_of(bundles: list[tuple[int, list[int]]]) -> Pieces:
    found, end = [], 0
    for context, lengths in bundles:
        first = end
        if context:
            found.append((end, context, 0, 0))
            end += context
        for length in lengths:
            found.append((end, length, first if context else 0, context))
            end += length
    return Pieces(*np.array(found, dtype=np.int64).T)


def dense(query: Tensor, key: Tensor, value: Tensor, pieces: Pieces, window: int | None) -> Tensor:
    """The same attention, computed with a mask [t, t]."""
    tokens = query.shape[2]
    mask = torch.zeros(tokens, tokens, dtype=torch.bool)
    for start, length, context_start, context in pieces.rows():
        seen = np.r_[context_start : context_start + context, start : start + length]
        for place in range(length):
            last = context + place + 1
            mask[start + place, seen[0 if window is None else max(0, last - window) : last]] = True
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, enable_gqa=True, scale=0.3
    ).transpose(1, 2)


def made(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values."""
    dice = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, tokens, SIZE, generator=dice).requires_grad_()
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    )
    return query, key, value


@settings(max_examples=60, deadline=None)
@given(BUNDLES, st.sampled_from([None, 3, 17]), st.sampled_from([5, 256]))
def test_pieces_attend_as_under_one_dense_mask(
    bundles: list[tuple[int, list[int]]], window: int | None, queries: int
) -> None:
    pieces = pieces_of(bundles)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "QUERIES", queries)
        given_tensors = made(int(pieces.tokens_p.sum()))
        mine, _ = attend(
            torch.nn.Identity(),
            *given_tensors,
            None,
            scaling=0.3,
            sliding_window=window,
            pieces=AttentionPlans(pieces),
        )
        theirs = dense(*given_tensors, pieces, window)
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
        factors = torch.randn(mine.shape, generator=torch.Generator().manual_seed(1))
        slopes = [
            torch.autograd.grad((factors * each).sum(), given_tensors) for each in (mine, theirs)
        ]
    for found, right in zip(*slopes, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)


def one_by_one(query: Tensor, key: Tensor, value: Tensor, row: VarlenRow, settings: Any) -> Tensor:
    """What a varlen kernel does: each run of queries with its run of keys, the last query at the last key."""
    found = []
    for first, last, key_first, key_last in zip(
        row.query_bounds, row.query_bounds[1:], row.key_bounds, row.key_bounds[1:], strict=False
    ):
        queries, keys = int(last - first), int(key_last - key_first)
        back = (torch.arange(queries) + keys - queries)[:, None] - torch.arange(keys)
        mask = (back >= 0) & (back < (settings.window or keys))
        out = functional.scaled_dot_product_attention(
            query[first:last].transpose(0, 1)[None],
            key[key_first:key_last].transpose(0, 1)[None],
            value[key_first:key_last].transpose(0, 1)[None],
            attn_mask=mask,
            scale=settings.scaling,
            enable_gqa=True,
        )
        found.append(out[0].transpose(0, 1))
        assert queries <= row.queries_longest
        assert keys <= row.keys_longest
    return torch.cat(found)


@settings(max_examples=30, deadline=None)
@given(BUNDLES, st.sampled_from([None, 3, 17]))
def test_a_varlen_kernel_gets_each_pieces_queries_and_keys(
    bundles: list[tuple[int, list[int]]], window: int | None
) -> None:
    pieces = pieces_of(bundles)
    query, key, value = made(int(pieces.tokens_p.sum()))
    query_thd, key_thd, value_thd = (each[0].transpose(0, 1) for each in (query, key, value))
    wanted = AttentionSettings(0.3, 0.0, window)
    row = _varlen(pieces, torch.device("cpu"))
    found = _run_varlen(one_by_one, row, query_thd, key_thd, value_thd, wanted)
    theirs = dense(query, key, value, pieces, window)
    torch.testing.assert_close(found[None], theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("capability", "installed", "used"),
    [
        (9, ["flash_attn_interface", "flash_attn"], "flash_attn_interface"),
        (9, ["flash_attn"], "flash_attn"),
        (8, ["flash_attn_interface", "flash_attn"], "flash_attn"),
        (9, [], None),
    ],
)
def test_flash_attention_3_is_used_on_hopper_gpus_alone(
    capability: int, installed: list[str], used: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules whose kernel returns the module's name stand in for the libraries."""
    for library in ("flash_attn_interface", "flash_attn"):
        module: Any = ModuleType(library)
        module.flash_attn_varlen_func = lambda *_, name=library, **__: (name, "sums")
        # None stands for a library that is not installed.
        monkeypatch.setitem(sys.modules, library, module if library in installed else None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (capability, 0))
    kernel = attention._kernel.__wrapped__()
    assert kernel is not None
    if used is not None:
        row = _varlen(pieces_of([(0, [3])]), torch.device("cpu"))
        assert kernel(*made(3), row, AttentionSettings(None, 0.0, None)) == used


def test_rows_without_pieces_are_causal() -> None:
    dice = torch.Generator().manual_seed(0)
    rows = torch.randn(3, HEADS, 9, SIZE, generator=dice)
    found, _ = attend(torch.nn.Identity(), rows, rows, rows, None)
    expected = functional.scaled_dot_product_attention(rows, rows, rows, is_causal=True)
    torch.testing.assert_close(found, expected.transpose(1, 2))


def test_an_answer_gives_no_gradient_to_another_one() -> None:
    pieces = pieces_of([(0, [9]), (0, [7]), (5, [3, 4])])
    given_tensors = made(28)
    found, _ = attend(torch.nn.Identity(), *given_tensors, None, pieces=AttentionPlans(pieces))
    slopes = torch.autograd.grad(found[:, 9:16].sum(), given_tensors)
    for slope in slopes:
        assert not slope[:, :, :9].any()
        assert not slope[:, :, 16:].any()


@pytest.mark.parametrize("others", [{"softcap": 30.0}, {"s_aux": torch.zeros(HEADS)}])
def test_attention_with_unknown_options_is_refused(others: dict[str, Any]) -> None:
    with pytest.raises(UnknownAttentionError):
        attend(torch.nn.Identity(), *made(5), None, **others)


@pytest.mark.parametrize("prompt", [64, 512])
def test_hardly_any_unread_pair_is_computed(prompt: int) -> None:
    """512 answers as long as reasoning, in rows of 16,384 tokens: at most 1.2 times the pairs that are read."""
    rng = np.random.default_rng(0)
    answers = [
        PackedAnswer(
            group,
            sample,
            np.zeros(prompt + length, dtype=np.int32),
            np.arange(prompt + length) >= prompt,
            np.zeros(length, dtype=np.float32),
            np.zeros(length, dtype=np.int64),
            np.float32(1.0),
            prompt=prompt,
        )
        for group in range(32)
        for sample, length in enumerate(rng.integers(60, 3000, 16).tolist())
    ]
    rows = [micro.pieces for micro in micro_batches(answers, 16384, packed=True)]
    read = sum(pieces.pairs for pieces in rows if pieces is not None)
    computed = sum(AttentionPlans(pieces).pairs() for pieces in rows if pieces is not None)
    print(f"computed / read = {computed / read:.3f}")  # noqa: T201
    assert read <= computed <= 1.2 * read
