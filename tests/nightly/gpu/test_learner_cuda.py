"""The learner on a GPU: bfloat16 layers, the varlen kernel, and its use of the GPU."""

import dataclasses
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config

from echo2d.learner.batch.packing import PackedAnswer, micro_batches
from echo2d.learner.config import Place
from echo2d.learner.model import attention, logprobs
from echo2d.learner.model.load import empty_model
from echo2d.learner.model.logprobs import LogitTail, TokenScores
from echo2d.learner.model.policy import Policy
from echo2d.learner.model.scorer import AnswerScorer
from echo2d.learner.ranks.ranks import Ranks, device_of
from tests.support.learner import config_in, gradient_of, learn, make_base
from tests.support.model_shapes import SHAPES, SMALL, answers, made, saved
from tests.support.scripted_coordinator import ScriptedCoordinator

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# The MFU that layers of an 8B model must reach on an H100, by the value of `compile`. An H200, whose memory is faster,
# reaches 0.36 without compiling.
MFU_MIN = {False: 0.28, True: 0.38}
ROW_TOKENS = 16384


@pytest.mark.parametrize(
    "shape", ["qwen3", "mistral with a window", "gemma3 with windows and a soft cap"]
)
def test_the_varlen_kernel_scores_as_sdpa_does(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = type(SHAPES[shape])(**{**SHAPES[shape].to_dict(), "head_dim": 64})
    model = made(config).to("cuda", torch.bfloat16)
    scorer = AnswerScorer(model)
    assert scorer.packed
    (micro,) = micro_batches(answers(model.config.vocab_size), 1000, packed=True)
    assert attention._kernel() is not None
    kernel_n = scorer(micro).logprobs_n
    monkeypatch.setattr(attention, "_kernel", lambda: None)
    torch.testing.assert_close(kernel_n, scorer(micro).logprobs_n, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("tail", [LogitTail(), LogitTail(scale=0.25), LogitTail(cap=5.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_kernels_score_as_torch_does(
    tail: LogitTail, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores and gradients in blocks, the last one narrower, with a bias, of log p and entropy."""
    device = torch.device("cuda", torch.cuda.current_device())
    assert logprobs._block_work(device).read is not logprobs.read_block, "Triton does not work here"
    monkeypatch.setattr(logprobs, "BLOCK_BYTES_ELSEWHERE", 4 * 300 * 2500)
    dice = torch.Generator("cuda").manual_seed(0)
    given = [
        torch.randn(*shape, device=device, generator=dice).to(dtype).requires_grad_()
        for shape in ((300, 64), (7001, 64), (7001,))
    ]
    tokens_n = torch.randint(0, 7001, (300,), device=device, generator=dice)
    heat_n = 0.5 + torch.rand(300, device=device, generator=dice)
    factors = torch.randn(2, 300, device=device, generator=dice)

    def run() -> tuple[TokenScores, list[Tensor]]:
        found = logprobs.token_scores(given[0], given[1], given[2], tokens_n, heat_n, tail)
        loss = (factors[0] * found.logprobs_n + factors[1] * found.entropy_n).sum()
        return found, list(torch.autograd.grad(loss, given))

    fused, fused_slopes = run()
    plain = logprobs._BlockWork(logprobs.read_block, logprobs.block_gradient)
    monkeypatch.setattr(logprobs, "_block_work", lambda _: plain)
    expected, expected_slopes = run()
    torch.testing.assert_close(fused, expected, rtol=1e-5, atol=2e-5)
    close = 1e-5 if dtype == torch.float32 else 2e-3  # a gradient in 16 bits may round another way
    for found, right in zip(fused_slopes, expected_slopes, strict=True):
        assert float((found.float() - right.float()).norm() / right.float().norm()) < close


def test_a_run_on_a_gpu_trains_publishes_and_resumes(tmp_path: Path) -> None:
    config = config_in(tmp_path, make_base(tmp_path / "base"), device="cuda", steps=2)
    config.snapshot_root.mkdir()
    coordinator = ScriptedCoordinator(tmp_path / "taken")
    rows = learn(config, coordinator)
    assert all(row["memory_gib"] > 0 for row in rows)
    rows = learn(dataclasses.replace(config, steps=4), coordinator, resume=True)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]


@pytest.mark.filterwarnings("ignore:::torch")  # what the compiler imports warns of its own future
@pytest.mark.parametrize("recompute", ["selective", "all"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3 moe"])
def test_compiled_layers_have_the_gradient_of_eager_ones(
    family: str, recompute: Any, tmp_path: Path
) -> None:
    """In bfloat16 the compiled gradient is about as near to that of float32 as the eager one is.

    Rounding may send a few tokens to another expert.
    """
    base = make_base(tmp_path / "base")
    model = saved(tmp_path / "model", family, base, head_dim=64)
    config = config_in(tmp_path, model, device="cuda", recompute=recompute)
    ranks = Ranks(device=device_of("cuda", Place()))
    exact = gradient_of(config, ranks, dtype="float32")
    eager, compiled = (
        float((gradient_of(config, ranks, compile=chosen) - exact).norm() / exact.norm())
        for chosen in (False, True)
    )
    print(f"{family}, {recompute}: eager {eager:.3f}, compiled {compiled:.3f}")  # noqa: T201
    assert compiled < 1.5 * eager + 0.01


@pytest.mark.filterwarnings("ignore:::torch")  # what the compiler imports warns of its own future
@pytest.mark.parametrize("compiled", [False, True])
def test_layers_of_an_8b_model_use_most_of_the_gpu(tmp_path: Path, compiled: bool) -> None:
    """Four layers of Qwen3-8B's shape, rows of 16,384 tokens in answers of 2,000: MFU, and the peak of memory."""
    shape: dict[str, Any] = {
        **SMALL,
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    }
    directory = tmp_path / "model"
    made(Qwen3Config(**shape)).to(torch.bfloat16).save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    assert empty_model(directory).num_parameters() > 1e9
    on_gpu = {
        "device": "cuda",
        "micro_batch_tokens": ROW_TOKENS,
        "recompute": "all",
        "compile": compiled,
    }
    config = config_in(tmp_path, directory, **on_gpu)
    ranks = Ranks(device=device_of("cuda", Place()))
    policy, rng = Policy(config, ranks), np.random.default_rng(0)
    tokens = rng.integers(0, 151_936, (32, 2048), dtype=np.int32)
    step = [
        PackedAnswer(
            group_id=number // 8,
            sample=number % 8,
            tokens=row,
            counts=np.arange(len(row)) >= 48,
            logprobs_n=np.full(2000, -12.0, dtype=np.float32),
            staleness_n=np.zeros(2000, dtype=np.int64),
            advantage=np.float32(1 - number % 2 * 2),
        )
        for number, row in enumerate(tokens)
    ]
    shares = []
    for number in range(1, 6):
        torch.cuda.synchronize()
        began = time.monotonic()
        report = policy.train_step(number, policy.lay_out([step]), 2)
        torch.cuda.synchronize()
        assert report.effort.peak is not None
        shares.append(report.effort.operations / (time.monotonic() - began) / report.effort.peak)
    mfu = float(np.median(shares[1:]))
    print(f"MFU {mfu:.3f} ({shares}), peak {report.effort.memory_gib:.1f} GiB")  # noqa: T201
    assert mfu >= MFU_MIN[compiled]
