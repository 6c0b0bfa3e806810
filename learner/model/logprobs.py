"""For each answer token: log p, the entropy, and the variance of -log p, without all logits in memory at once.

The vocabulary is read in blocks of columns. The forward pass keeps a maximum and three sums for each token
(the online softmax of arXiv 1805.02867, with two more moments); the backward pass computes the logits of a block
again. So at most two blocks are in memory, for any number of tokens and any vocabulary, and each row of the head's
gradient is written once. Logits, softmax and sums are float32 for weights of any dtype.

    y = (tail(h W^T + b) / temperature) - m      m: the largest logit of the token
    s0 = sum e^y   s1 = sum y e^y   s2 = sum y^2 e^y
    log p = y_token - log s0        H = log s0 - s1/s0        variance of -log p = s2/s0 - (s1/s0)^2

On a GPU one Triton kernel reads a block, and one makes its gradient (`logit_kernels.py`).

Suffixes of names: n = answer tokens, h = hidden size, v = vocabulary, k = the columns of a block, s = five numbers of
a token: its largest logit, its own logit, s0, s1, s2.
"""

import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Bytes of a block's logits, by device. On a CPU they fit into its cache. Elsewhere wide blocks are faster: they need
# fewer kernels, and the hidden states' gradient, to which each block adds, is read and written less often.
LOGIT_BLOCK_BYTES = {"cpu": 4 << 20}
BLOCK_BYTES_ELSEWHERE = 256 << 20
# Bytes of the logits of whole tokens. Each block reads all of the head, so it must not be a small one.
WHOLE_LOGITS_BYTES = {"cpu": 64 << 20}
# The columns of a block are a multiple of this. On an H200 matrix products with fewer columns, or with another number
# of them, took twice as long. With 16,384 tokens the narrowest block has 16 MB.
COLUMNS_MIN = 256

log = logging.getLogger("echo2d.learner")


@dataclass(frozen=True, slots=True)
class LogitTail:
    """How a model changes its head's output: logits = scale * x, or cap * tanh(x / cap) if cap is not 0."""

    scale: float = 1.0
    cap: float = 0.0

    def bend_(self, raw_nk: Tensor) -> Tensor:
        """The logits, in place of the head's output."""
        if self.cap:
            return raw_nk.div_(self.cap).tanh_().mul_(self.cap)
        return raw_nk if self.scale == 1.0 else raw_nk.mul_(self.scale)

    def unbend_(self, gradient_nk: Tensor, logits_nk: Tensor) -> Tensor:
        """The gradient of the head's output, in place of that of the logits."""
        if self.cap:
            return gradient_nk.mul_(1.0 - (logits_nk / self.cap).square_())
        return gradient_nk if self.scale == 1.0 else gradient_nk.mul_(self.scale)


@dataclass(frozen=True, slots=True)
class LogitBlock:
    """The head's output [n, k] from column `start` on, and the tokens that it is for. A reader may change it."""

    raw_nk: Tensor
    start: int
    tokens_n: Tensor
    temperatures_n: Tensor
    tail: LogitTail

    def logits_(self) -> Tensor:
        """The logits at each token's temperature, in place of the head's output."""
        return self.tail.bend_(self.raw_nk).div_(self.temperatures_n[:, None])

    def inside(self) -> tuple[Tensor, Tensor]:
        """Which tokens have their column in this block [n], and that column [n, 1], 0 for the other tokens."""
        places_n = self.tokens_n - self.start
        here_n = (places_n >= 0) & (places_n < self.raw_nk.shape[1])
        return here_n, (places_n * here_n)[:, None]


class ScoreSlopes(NamedTuple):
    """All that the gradient of a block depends on besides its logits, for each token [n], float32."""

    normalizer_n: Tensor
    entropy_n: Tensor
    logprobs_grad_n: Tensor
    entropy_grad_n: Tensor | None


class TokenScores(NamedTuple):
    """The scores of each answer token [n], float32, under the distribution from which the token was drawn."""

    logprobs_n: Tensor
    entropy_n: Tensor  # in nats
    variance_n: Tensor  # of the surprise -log p, without gradient


def token_scores(
    hidden_nh: Tensor,
    weight_vh: Tensor,
    bias_v: Tensor | None,
    tokens_n: Tensor,
    temperatures_n: Tensor,
    tail: LogitTail,
) -> TokenScores:
    """Score these tokens by the head's weights, with gradient to the first three arguments."""
    found = _Scores.apply(hidden_nh, weight_vh, bias_v, tokens_n, temperatures_n, tail)  # type: ignore[no-untyped-call]
    return TokenScores(*found)


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_nh: Tensor,
        weight_vh: Tensor,
        bias_v: Tensor | None,
        tokens_n: Tensor,
        temperatures_n: Tensor,
        tail: LogitTail,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        head = _Head(hidden_nh, weight_vh, bias_v, tokens_n, temperatures_n, tail)
        sums_sn = torch.zeros(5, len(tokens_n), device=hidden_nh.device)
        sums_sn[0] = float("-inf")
        work = _block_work(hidden_nh.device)
        for block in head.blocks():
            work.read(block, sums_sn)
        largest_n, own_n, s0_n, s1_n, s2_n = sums_sn
        normalizer_n, mean_n = s0_n.log() + largest_n, s1_n / s0_n
        entropy_n = s0_n.log() - mean_n
        variance_n = (s2_n / s0_n - mean_n.square()).clamp_(min=0.0)
        ctx.save_for_backward(
            hidden_nh, weight_vh, bias_v, tokens_n, temperatures_n, normalizer_n, entropy_n
        )
        ctx.tail = tail
        ctx.mark_non_differentiable(variance_n)
        return own_n - normalizer_n, entropy_n, variance_n

    @staticmethod
    def backward(
        ctx: Any, logprobs_grad_n: Tensor | None, entropy_grad_n: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        hidden_nh, weight_vh, bias_v, tokens_n, temperatures_n, normalizer_n, entropy_n = (
            ctx.saved_tensors
        )
        if logprobs_grad_n is None:
            logprobs_grad_n = torch.zeros_like(normalizer_n)
        slopes = ScoreSlopes(normalizer_n, entropy_n, logprobs_grad_n, entropy_grad_n)
        head = _Head(hidden_nh, weight_vh, bias_v, tokens_n, temperatures_n, ctx.tail)
        for_weight, for_bias = ctx.needs_input_grad[1:3]
        weight_grad_vh = torch.empty_like(weight_vh) if for_weight else None
        bias_grad_v = torch.empty_like(bias_v) if for_bias else None
        hidden_grad_nh = torch.zeros(hidden_nh.shape, device=hidden_nh.device)
        work = _block_work(hidden_nh.device)
        for block in head.blocks():
            columns = slice(block.start, block.start + block.raw_nk.shape[1])
            raw_grad_nk = work.gradient(block, slopes, weight_vh.dtype)
            _add_product(hidden_grad_nh, raw_grad_nk, weight_vh[columns])
            if weight_grad_vh is not None:
                torch.mm(raw_grad_nk.T, hidden_nh.to(weight_vh.dtype), out=weight_grad_vh[columns])
            if bias_grad_v is not None:
                bias_grad_v[columns] = raw_grad_nk.sum(0)
        return hidden_grad_nh.to(hidden_nh.dtype), weight_grad_vh, bias_grad_v, None, None, None


@dataclass(frozen=True, slots=True)
class _Head:
    hidden_nh: Tensor
    weight_vh: Tensor
    bias_v: Tensor | None
    tokens_n: Tensor
    temperatures_n: Tensor
    tail: LogitTail

    def blocks(self) -> Iterator[LogitBlock]:
        device = self.hidden_nh.device.type
        tokens, vocabulary = len(self.hidden_nh), len(self.weight_vh)
        columns = LOGIT_BLOCK_BYTES.get(device, BLOCK_BYTES_ELSEWHERE) // (4 * max(1, tokens))
        columns = min(vocabulary, max(COLUMNS_MIN, columns // COLUMNS_MIN * COLUMNS_MIN))
        hidden_nh = self.hidden_nh.to(self.weight_vh.dtype)
        for start in range(0, vocabulary, columns):
            block = slice(start, start + columns)
            raw_nk = _product(hidden_nh, self.weight_vh[block].T)
            if self.bias_v is not None:
                raw_nk += self.bias_v[block]
            yield LogitBlock(raw_nk, start, self.tokens_n, self.temperatures_n, self.tail)


def whole_logits(
    hidden_nh: Tensor, weight_vh: Tensor, bias_v: Tensor | None, tail: LogitTail
) -> Iterator[Tensor]:
    """The logits of all columns [some of n, v] in float32, a few tokens at a time, without gradient."""
    most = WHOLE_LOGITS_BYTES.get(hidden_nh.device.type, BLOCK_BYTES_ELSEWHERE)
    tokens = max(1, most // (4 * len(weight_vh)))
    for part_nh in torch.split(hidden_nh.to(weight_vh.dtype), tokens):
        raw_nv = _product(part_nh, weight_vh.T)
        if bias_v is not None:
            raw_nv += bias_v
        yield tail.bend_(raw_nv)


def read_block(block: LogitBlock, sums_sn: Tensor) -> None:
    """Add a block to the sums [s, n] of its tokens, in place."""
    largest_n, own_n, s0_n, s1_n, s2_n = sums_sn
    logits_nk = block.logits_()
    here_n, places_n = block.inside()
    own_n.copy_(torch.where(here_n, logits_nk.gather(1, places_n)[:, 0], own_n))
    before_n = largest_n.clone()
    torch.maximum(before_n, logits_nk.amax(1), out=largest_n)
    # The largest logit may have grown; the sums so far are rescaled to the new one.
    step_n = torch.where(s0_n > 0, before_n - largest_n, 0.0)
    shrink_n = step_n.exp()
    s2_n.add_(2 * step_n * s1_n + step_n.square() * s0_n).mul_(shrink_n)
    s1_n.add_(step_n * s0_n).mul_(shrink_n)
    s0_n.mul_(shrink_n)
    y_nk = logits_nk.sub_(largest_n[:, None])
    weighted_nk = y_nk.exp()
    s0_n += weighted_nk.sum(1)
    s1_n += weighted_nk.mul_(y_nk).sum(1)
    s2_n += weighted_nk.mul_(y_nk).sum(1)


def block_gradient(block: LogitBlock, slopes: ScoreSlopes, dtype: torch.dtype) -> Tensor:
    """The gradient [n, k] of the head's output in a block, rounded to `dtype`."""
    normalizer_n, entropy_n, logprobs_grad_n, entropy_grad_n = slopes
    logits_nk = block.logits_()
    y_nk = logits_nk - normalizer_n[:, None]
    gradient_nk = y_nk.exp()
    if entropy_grad_n is None:
        gradient_nk.mul_(-logprobs_grad_n[:, None])
    else:
        # dH/dz = -p (log p + H)
        slope_nk = y_nk.add_(entropy_n[:, None]).mul_(entropy_grad_n[:, None])
        gradient_nk.mul_(slope_nk.add_(logprobs_grad_n[:, None])).neg_()
    here_n, places_n = block.inside()
    gradient_nk.scatter_add_(1, places_n, (logprobs_grad_n * here_n)[:, None])
    gradient_nk.div_(block.temperatures_n[:, None])
    logits_nk.mul_(block.temperatures_n[:, None])
    return block.tail.unbend_(gradient_nk, logits_nk).to(dtype)


class _BlockWork(NamedTuple):
    read: Callable[[LogitBlock, Tensor], None]
    gradient: Callable[[LogitBlock, ScoreSlopes, torch.dtype], Tensor]


@functools.cache
def _block_work(device: torch.device) -> _BlockWork:
    """The functions that read blocks on this device: on a GPU the Triton kernels if they run there."""
    plain = _BlockWork(read_block, block_gradient)
    if device.type != "cuda":
        return plain
    try:
        # Builds of torch for GPUs include Triton.
        from echo2d.learner.model import logit_kernels

        kernels = _BlockWork(logit_kernels.read_block, logit_kernels.block_gradient)
        _try(kernels, device)
    except Exception as error:  # noqa: BLE001 - Triton and its compilers fail in many ways
        line = " ".join(str(error).split())
        log.warning("the head runs without fused kernels: Triton does not work here: %s", line)
        return plain
    return kernels


def _try(work: _BlockWork, device: torch.device) -> None:
    """Run both functions on one logit."""
    ones_n = torch.ones(1, device=device)
    block = LogitBlock(ones_n[:, None], 0, ones_n.long(), ones_n, LogitTail())
    work.read(block, torch.zeros(5, 1, device=device))
    work.gradient(block, ScoreSlopes(ones_n, ones_n, ones_n, None), torch.float32)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """The matrix product in float32, also for factors of narrower types."""
    if left.dtype == torch.float32:
        return left @ right
    if left.device.type == "cuda":
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def _add_product(sum_nh: Tensor, left: Tensor, right: Tensor) -> None:
    """Add the matrix product to a float32 sum."""
    if left.device.type == "cuda" and left.dtype != torch.float32:
        torch.addmm(sum_nh, left, right, out_dtype=torch.float32, out=sum_nh)
    else:
        sum_nh += _product(left, right)
