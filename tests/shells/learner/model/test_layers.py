"""The choice of what layers keep for the backward pass changes memory, but no number."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import SelectiveCheckpointContext

from echo2d.learner.config import LearnerConfig
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
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles C++ for a CPU")
def test_compiled_layers_have_the_same_gradient(
    config: LearnerConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    plain = gradient(config)
    compiled = gradient(config, compile=True, recompute="selective")
    assert compiled_frames() > 0
    torch.testing.assert_close(compiled, plain, rtol=1e-5, atol=1e-6)


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
