"""Time the vocabulary head on one GPU: forward and backward of 16,000 answer tokens, by the size of a block.

    python -m echo2d_lab.research.head_blocks [--hidden 2048 4096] [--mib 64 256] [--plain]

The weights are random bfloat16, the vocabulary has 151,936 tokens, and the gradient is that of the sum of log p.
Figures are medians of 5 runs after one that does not count. --plain: without the fused kernels.
"""

import argparse
from statistics import median

import torch

from echo2d.learner.model import logprobs
from echo2d.learner.model.logprobs import LogitTail, token_scores

TOKENS, VOCABULARY, ROUNDS = 16_000, 151_936, 5


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hidden", type=int, nargs="*", default=[2048, 4096])
    parser.add_argument("--mib", type=int, nargs="*", default=[64, 256])
    parser.add_argument("--plain", action="store_true")
    asked = parser.parse_args()
    if asked.plain:
        plain = logprobs._BlockWork(logprobs.read_block, logprobs.block_gradient)  # noqa: SLF001
        logprobs._block_work = lambda _: plain  # type: ignore[assignment]  # noqa: SLF001
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for hidden in asked.hidden:
        for mib in asked.mib:
            logprobs.BLOCK_BYTES_ELSEWHERE = mib << 20
            forward, backward = _measure(hidden)
            print(f"hidden {hidden}, {mib} MiB: {forward:.0f} + {backward:.0f} ms", flush=True)


def _measure(hidden: int) -> tuple[float, float]:
    """Milliseconds forward and backward."""
    states_nh, weight_vh = (
        torch.randn(size, hidden, device="cuda").mul_(0.02).bfloat16().requires_grad_()
        for size in (TOKENS, VOCABULARY)
    )
    tokens_n = torch.randint(0, VOCABULARY, (TOKENS,), device="cuda")
    heat_n = torch.ones(TOKENS, device="cuda")
    times = []
    for _ in range(1 + ROUNDS):
        began, between, ended = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(3)
        )
        began.record()
        found = token_scores(states_nh, weight_vh, None, tokens_n, heat_n, LogitTail())
        between.record()
        torch.autograd.grad(found.logprobs_n.sum(), [states_nh, weight_vh])
        ended.record()
        torch.cuda.synchronize()
        times.append((began.elapsed_time(between), between.elapsed_time(ended)))
    forward, backward = zip(*times[1:], strict=True)
    return median(forward), median(backward)


if __name__ == "__main__":
    main()
