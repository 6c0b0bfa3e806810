"""The choice of what layers keep for the backward pass changes memory, but no number."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import SelectiveCheckpointContext

from echo2d.learner.batch.packing import Pieces
from echo2d.learner.config import LearnerConfig
from echo2d.learner.model import scorer
from echo2d.learner.model.attention import (
    AttentionPlans,
    AttentionSettings,
    VarlenRow,
    _run_varlen,
    _varlen,
)
from echo2d.learner.model.layers import PRODUCTS, _Keeping
from echo2d.learner.ranks.ranks import Ranks
from tests.support.learner import gradient_of
from tests.support.model_shapes import saved


def gradient(config: LearnerConfig, **changes: Any) -> Tensor:
    return gradient_of(config, Ranks(), **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"recompute": "selective"},
        {"recompute": "all"},
        {"recompute": "selective", "micro_batch_tokens": 20, "gradient_sync": "last"},
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_gradient_does_not_depend_on_what_layers_keep(
    config: LearnerConfig, dtype: Any, changes: Any
) -> None:
    same = {"dtype": dtype, "micro_batch_tokens": changes.get("micro_batch_tokens", 4096)}
    plain = gradient(config, recompute="none", **same)
    close = 1e-5 if dtype == "float32" else 2e-2
    torch.testing.assert_close(
        gradient(config, **{**same, **changes}),
        plain,
        rtol=close,
        atol=close * float(plain.abs().max()),
    )


@pytest.mark.parametrize("recompute", ["selective", "all"])
@pytest.mark.parametrize("family", ["qwen3 moe", "mixtral", "gpt-oss"])
def test_the_gradient_of_experts_does_not_depend_on_what_layers_keep(
    config: LearnerConfig, base: Path, tmp_path: Path, family: str, recompute: Any
) -> None:
    """The experts of GPT-OSS have biases, and it keeps its own attention."""
    changes = {"model": saved(tmp_path / "model", family, base), "micro_batch_tokens": 40}
    plain = gradient(config, recompute="none", **changes)
    again = gradient(config, recompute=recompute, **changes)
    torch.testing.assert_close(again, plain, rtol=1e-5, atol=1e-5 * float(plain.abs().max()))


@pytest.mark.filterwarnings("ignore:::torch")  # what the compiler imports warns of its own future
@pytest.mark.nightly
@pytest.mark.parametrize("family", ["qwen3", "qwen3 moe"])
def test_layers_that_are_traced_to_be_compiled_have_the_same_gradient(
    config: LearnerConfig, base: Path, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, the attention of a row is one kernel, and a layer with its recomputation is traced as one piece. The
    traced operations then run as they are, because to compile them for a CPU takes many minutes.
    """
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(scorer, "AttentionPlans", OneKernel)
    model = saved(tmp_path / "model", family, base, num_hidden_layers=1, layer_types=None)
    config = dataclasses.replace(config, model=model)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    plain = gradient(config)
    compiled = gradient(config, compile=True, recompute="selective")
    assert compiled_frames() > 0
    assert not torch._dynamo.utils.counters["graph_break"]
    torch.testing.assert_close(compiled, plain, rtol=1e-4, atol=1e-5 * float(plain.abs().max()))


class OneKernel(AttentionPlans):
    """Attention by a kernel like those of a GPU: it has no loop over pieces, so it is compiled with its layer."""

    def __init__(self, pieces: Pieces, device: torch.device | None = None) -> None:
        super().__init__(pieces)
        self._row = _varlen(pieces, torch.device("cpu"))

    def run(
        self, query_thd: Tensor, key_thd: Tensor, value_thd: Tensor, settings: AttentionSettings
    ) -> Tensor:
        return _run_varlen(masked, self._row, query_thd, key_thd, value_thd, settings)


def masked(
    query: Tensor, key: Tensor, value: Tensor, row: VarlenRow, settings: AttentionSettings
) -> Tensor:
    """A varlen kernel that computes all pairs of tokens, and hides those of different pieces and of later tokens."""

    def places(bounds: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The piece of each token, and how many tokens its piece has from there on."""
        index_t = torch.arange(count)
        piece_t = torch.bucketize(index_t, bounds[1:], right=True)
        return piece_t, bounds[piece_t + 1] - index_t

    query_pieces, query_left = places(row.query_bounds, query.shape[0])
    key_pieces, key_left = places(row.key_bounds, key.shape[0])
    seen_qk = (query_pieces[:, None] == key_pieces) & (key_left >= query_left[:, None])
    query_hqd, key_hkd, value_hkd = (each.transpose(0, 1)[None] for each in (query, key, value))
    out = functional.scaled_dot_product_attention(
        query_hqd, key_hkd, value_hkd, attn_mask=seen_qk, scale=settings.scaling, enable_gqa=True
    )
    return out[0].transpose(0, 1)


def compiled_frames() -> int:
    """How many pieces of code torch.compile has made since the start of the process."""
    return int(torch._dynamo.utils.counters["frames"]["ok"])


def test_layers_keep_the_same_results_when_older_versions_of_torch_ask_again() -> None:
    """A layer has seven products: a count that went on in the second run would keep the other ones."""
    keeping, product = _Keeping(PRODUCTS), torch.ops.aten.mm.default
    first, again = (
        [keeping(SelectiveCheckpointContext(is_recompute=run), product) for _ in range(7)]
        for run in (False, True)
    )
    assert first == again
    assert len(set(first)) == 2
