"""Triton kernels for a block of the head's output on a GPU, with the formulas and names of `logprobs.py`.

Each kernel reads the block once. Torch would start a kernel for every operation, which reads and writes the block. A
program handles one token, WIDTH columns at a time.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803

import torch
import triton
import triton.language as tl
from torch import Tensor

from echo2d.learner.model.logprobs import LogitBlock, ScoreSlopes

WIDTH, WARPS = 2048, 8


def read_block(block: LogitBlock, sums_sn: Tensor) -> None:
    """As `logprobs.read_block`."""
    tokens, columns = block.raw_nk.shape
    if not tokens:
        return
    with torch.cuda.device_of(block.raw_nk):
        _read[(tokens,)](
            block.raw_nk, columns, block.start, block.tokens_n.contiguous(),
            block.temperatures_n.contiguous(), sums_sn, tokens, block.tail.scale, block.tail.cap,
            CAPPED=block.tail.cap != 0, WIDTH=WIDTH, num_warps=WARPS,
        )  # fmt: skip


def block_gradient(block: LogitBlock, slopes: ScoreSlopes, dtype: torch.dtype) -> Tensor:
    """As `logprobs.block_gradient`."""
    tokens, columns = block.raw_nk.shape
    gradient_nk = torch.empty_like(block.raw_nk, dtype=dtype)
    if not tokens:
        return gradient_nk
    given = [each if each is None else each.contiguous() for each in slopes]
    with torch.cuda.device_of(block.raw_nk):
        _slope[(tokens,)](
            block.raw_nk, columns, block.start, block.tokens_n.contiguous(),
            block.temperatures_n.contiguous(), *given, gradient_nk, block.tail.scale, block.tail.cap,
            CAPPED=block.tail.cap != 0, WIDTH=WIDTH, num_warps=WARPS,
        )  # fmt: skip
    return gradient_nk


@triton.jit
def _bent(raw, scale, cap, CAPPED: tl.constexpr):
    """The logits, as `LogitTail.bend_` has them."""
    if CAPPED:
        # The hyperbolic tangent, to within 1e-7: Triton has it only in libraries of single devices.
        shrunk = tl.exp(-2.0 * tl.abs(raw / cap))
        size = cap * (1.0 - shrunk) / (1.0 + shrunk)
        return tl.where(raw < 0, -size, size)
    else:  # noqa: RET505 - Triton compiles one of the two
        return raw * scale


@triton.jit
def _read(
    raw_ptr, columns, start, tokens_ptr, temperatures_ptr, sums_ptr, tokens, scale, cap,
    CAPPED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    raw_ptr += row * columns
    sums_ptr += row
    temperature = tl.load(temperatures_ptr + row)
    largest = tl.load(sums_ptr)
    s0 = tl.load(sums_ptr + 2 * tokens)
    s1 = tl.load(sums_ptr + 3 * tokens)
    s2 = tl.load(sums_ptr + 4 * tokens)
    for first in range(0, columns, WIDTH):
        places = first + tl.arange(0, WIDTH)
        inside = places < columns
        raw = tl.load(raw_ptr + places, mask=inside, other=0.0)
        logits = _bent(raw, scale, cap, CAPPED) / temperature
        before = largest
        largest = tl.maximum(before, tl.max(tl.where(inside, logits, float("-inf")), 0))
        step = tl.where(s0 > 0, before - largest, 0.0)
        shrink = tl.exp(step)
        y = tl.where(inside, logits - largest, 0.0)
        weighted = tl.where(inside, tl.exp(y), 0.0)
        s2 = shrink * (s2 + 2 * step * s1 + step * step * s0) + tl.sum(weighted * y * y, 0)
        s1 = shrink * (s1 + step * s0) + tl.sum(weighted * y, 0)
        s0 = shrink * s0 + tl.sum(weighted, 0)
    place = tl.load(tokens_ptr + row) - start
    if (place >= 0) & (place < columns):
        own = _bent(tl.load(raw_ptr + place), scale, cap, CAPPED) / temperature
        tl.store(sums_ptr + tokens, own)
    tl.store(sums_ptr, largest)
    tl.store(sums_ptr + 2 * tokens, s0)
    tl.store(sums_ptr + 3 * tokens, s1)
    tl.store(sums_ptr + 4 * tokens, s2)


@triton.jit
def _slope(
    raw_ptr, columns, start, tokens_ptr, temperatures_ptr, normalizer_ptr, entropy_ptr,
    logprobs_grad_ptr, entropy_grad_ptr, gradient_ptr, scale, cap,
    CAPPED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    raw_ptr += row * columns
    gradient_ptr += row * columns
    place = tl.load(tokens_ptr + row) - start
    temperature = tl.load(temperatures_ptr + row)
    normalizer = tl.load(normalizer_ptr + row)
    logprobs_grad = tl.load(logprobs_grad_ptr + row)
    for first in range(0, columns, WIDTH):
        places = first + tl.arange(0, WIDTH)
        inside = places < columns
        raw = tl.load(raw_ptr + places, mask=inside, other=0.0)
        logits = _bent(raw, scale, cap, CAPPED)
        y = logits / temperature - normalizer
        slope = logprobs_grad
        if entropy_grad_ptr is not None:
            slope += (y + tl.load(entropy_ptr + row)) * tl.load(entropy_grad_ptr + row)
        gradient = (tl.where(places == place, logprobs_grad, 0.0) - tl.exp(y) * slope) / temperature
        if CAPPED:
            gradient *= 1.0 - (logits / cap) * (logits / cap)
        else:
            gradient *= scale
        tl.store(gradient_ptr + places, gradient.to(gradient_ptr.dtype.element_ty), mask=inside)
