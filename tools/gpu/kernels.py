"""Time the kernels that most of a train step goes into besides products: attention in pieces, and the head."""

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from echo2d.learner.batch.packing import Pieces
from echo2d.learner.model import attention, logprobs
from echo2d.learner.model.attention import AttentionPlans, AttentionSettings
from echo2d.learner.model.logprobs import LogitTail, token_scores
from tools.gpu.rows import Row, device, on_gpu, seconds

HEADS, KEY_HEADS, CHANNELS = 32, 8, 128  # of Qwen3-8B
VOCABULARY, ANSWER_TOKENS = 151_936, 16_000
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def kernels(*, small: bool) -> Iterator[Row]:
    """Section C."""
    reason = "not installed" if on_gpu() else "needs a GPU"
    for tokens in (256,) if small else (16_384, 32_768):
        zero = np.zeros(1, dtype=np.int64)
        pieces = Pieces(zero, np.array([tokens]), zero, zero)
        for name, attend in _attentions(pieces).items():
            if attend is None:
                yield Row(f"attention of {tokens:,} tokens, {name}", skipped=reason)
            else:
                yield _attention(f"attention of {tokens:,} tokens, {name}", tokens, attend)
    for hidden in (64,) if small else (2048, 4096):
        yield _head(hidden, small=small)
        if not on_gpu():
            yield Row("the head, without Triton", skipped="a CPU has no other kernels")
            continue
        with _without_triton():
            yield _head(hidden, small=small, note=", without Triton")


@contextlib.contextmanager
def _without_triton() -> Iterator[None]:
    """In the block the head runs with torch's own kernels."""
    plain = logprobs._BlockWork(logprobs.read_block, logprobs.block_gradient)  # noqa: SLF001
    chosen = logprobs._block_work  # noqa: SLF001
    logprobs._block_work = lambda _: plain  # type: ignore[assignment]  # noqa: SLF001
    try:
        yield
    finally:
        logprobs._block_work = chosen  # noqa: SLF001


def _attentions(pieces: Pieces) -> dict[str, Attend | None]:
    """What the learner chooses, and each varlen kernel; None: it is not installed."""
    settings = AttentionSettings(None, 0.0, None)
    plans = AttentionPlans(pieces, device())
    found: dict[str, Attend | None] = {
        "as the learner computes it": partial(plans.run, settings=settings)
    }
    row = attention._varlen(pieces, device())  # noqa: SLF001
    for name in ("flash_attn_interface", "flash_attn", "torch"):
        kernel = _varlen_kernel(name)
        found[f"kernel of {name}"] = kernel and partial(kernel, row=row, settings=settings)
    return found


def _varlen_kernel(name: str) -> Any:
    """The varlen kernel of torch or of a library; None: this machine cannot run it."""
    if not on_gpu():
        return None
    if name == "torch":
        return attention._torchs_kernel()  # noqa: SLF001
    if name == "flash_attn_interface" and torch.cuda.get_device_capability()[0] != 9:
        return None
    with contextlib.suppress(ImportError):
        varlen = importlib.import_module(name).flash_attn_varlen_func
        return attention._calling(varlen, "softmax_scale", causal=True)  # noqa: SLF001
    return None


def _attention(what: str, tokens: int, attend: Attend) -> Row:
    """Forward and backward of one answer. An operation is a multiplication or an addition."""
    kind: Any = {"device": device(), "dtype": torch.bfloat16 if on_gpu() else torch.float32}
    given = [
        torch.randn(tokens, heads, CHANNELS, requires_grad=True, **kind)
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    ]
    slope = torch.randn(tokens, HEADS, CHANNELS, **kind)
    forward, backward = _passes(lambda: attend(*given), given, slope)
    operations = 4 * (tokens**2 / 2) * HEADS * CHANNELS / 1e12
    return Row(
        what,
        {
            "TFLOP/s forward": operations / forward,
            # The backward pass has five products where the forward pass has two.
            "TFLOP/s backward": 2.5 * operations / backward,
            "ms forward": forward * 1e3,
            "ms backward": backward * 1e3,
        },
    )


def _head(hidden: int, *, small: bool, note: str = "") -> Row:
    """Forward and backward of the head over the vocabulary, for the sum of log p."""
    count, vocabulary = (200, 1000) if small else (ANSWER_TOKENS, VOCABULARY)
    states_nh, weight_vh = (
        torch.randn(size, hidden, device=device())
        .mul_(0.02)
        .to(torch.bfloat16 if on_gpu() else torch.float32)
        .requires_grad_()
        for size in (count, vocabulary)
    )
    tokens_n = torch.randint(0, vocabulary, (count,), device=device())
    heat_n = torch.ones(count, device=device())

    def forward() -> Tensor:
        return token_scores(
            states_nh, weight_vh, None, tokens_n, heat_n, LogitTail()
        ).logprobs_n.sum()

    before, behind = _passes(forward, [states_nh, weight_vh], None)
    return Row(
        f"head of {count:,} answer tokens, hidden size {hidden:,}{note}",
        {"ms forward": before * 1e3, "ms backward": behind * 1e3},
    )


def _passes(
    forward: Callable[[], Tensor], given: Sequence[Tensor], slope: Tensor | None
) -> tuple[float, float]:
    """Seconds of the forward and of the backward pass. slope: the gradient of the output."""
    kept: list[Tensor] = []

    def again() -> None:
        kept[:] = [forward()]

    return seconds(forward), seconds(
        lambda: torch.autograd.grad(kept.pop(), given, slope), before=again
    )
