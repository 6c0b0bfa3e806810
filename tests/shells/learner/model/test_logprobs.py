"""log p, entropy and variance in blocks of the vocabulary, compared with torch's own in one piece."""

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from echo2d.learner.model import logprobs
from echo2d.learner.model.logprobs import LogitTail, TokenScores, token_scores

TOKENS, HIDDEN, VOCABULARY = 23, 12, 700
TAILS = [LogitTail(), LogitTail(scale=0.25), LogitTail(cap=5.0)]

# Prints the peak memory, in MiB above the start, of the scores and their gradient for this many tokens.
PEAK = """
import resource, sys, torch
from echo2d.learner.model.logprobs import LogitTail, token_scores
torch.set_num_threads(1)
tokens, vocabulary, hidden = int(sys.argv[1]), 151_936, 256
h, w = torch.randn(tokens, hidden), torch.nn.Parameter(torch.randn(vocabulary, hidden))
h.requires_grad_()
w.grad = torch.zeros_like(w)
drawn = torch.randint(0, vocabulary, (tokens,))
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before = peak()
found = token_scores(h, w, None, drawn, torch.ones(tokens), LogitTail())
torch.autograd.backward(found.logprobs_n.sum())
print(peak() - before)
"""


def plain(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tokens: Tensor,
    heat: Tensor,
    tail: LogitTail,
) -> TokenScores:
    """The same scores by torch's log_softmax over all logits."""
    raw = torch.nn.functional.linear(
        hidden.double(), weight.double(), None if bias is None else bias.double()
    )
    logits = tail.cap * torch.tanh(raw / tail.cap) if tail.cap else tail.scale * raw
    everything = torch.log_softmax(logits / heat[:, None], dim=1)
    entropy = -(everything.exp() * everything).sum(1)
    variance = (everything.exp() * (everything + entropy[:, None]).square()).sum(1)
    return TokenScores(everything.gather(1, tokens[:, None])[:, 0], entropy, variance)


def made(*, bias: bool = False) -> list[Tensor]:
    dice = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=dice)
    weight, offset = (
        torch.randn(*shape, generator=dice) for shape in ((VOCABULARY, HIDDEN), (VOCABULARY,))
    )
    return [
        each.requires_grad_() for each in ([hidden, weight, offset] if bias else [hidden, weight])
    ]


def gradients(
    score: Callable[..., TokenScores], *, bias: bool, tail: LogitTail
) -> tuple[TokenScores, list[Tensor]]:
    """The scores, and the gradients of a sum of log p and entropy with odd factors."""
    given = made(bias=bias)
    dice = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (TOKENS,), generator=dice)
    heat = 0.5 + torch.rand(TOKENS, generator=dice)
    found = score(given[0], given[1], given[2] if bias else None, tokens, heat, tail)
    factors = torch.randn(2, TOKENS, generator=dice)
    loss = (factors[0] * found.logprobs_n + factors[1] * found.entropy_n).sum()
    return found, list(torch.autograd.grad(loss, given))


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("columns", [64, 300, 10_000])
def test_scores_and_gradients_in_blocks_equal_those_of_the_whole_vocabulary(
    monkeypatch: pytest.MonkeyPatch, tail: LogitTail, bias: bool, columns: int
) -> None:
    monkeypatch.setattr(logprobs, "COLUMNS_MIN", columns)
    monkeypatch.setitem(logprobs.LOGIT_BLOCK_BYTES, "cpu", 1)
    mine, slopes = gradients(token_scores, bias=bias, tail=tail)
    theirs, expected = gradients(plain, bias=bias, tail=tail)
    for found, right in zip(mine, theirs, strict=True):
        torch.testing.assert_close(found.double(), right.double(), rtol=1e-5, atol=1e-5)
    for found, right in zip(slopes, expected, strict=True):
        assert float((found - right).norm() / right.norm()) < 1e-6


def test_a_certain_distribution_has_no_entropy() -> None:
    hidden, weight = torch.tensor([[500.0]]), torch.tensor([[0.0], [1.0], [0.0]])
    found = token_scores(hidden, weight, None, torch.tensor([1]), torch.ones(1), LogitTail())
    assert [float(each) for each in found] == [0.0, 0.0, 0.0]


def test_an_empty_batch_has_no_scores_and_a_gradient_of_zero() -> None:
    hidden, weight = torch.zeros(0, HIDDEN, requires_grad=True), made()[1]
    nothing = torch.zeros(0)
    found = token_scores(hidden, weight, None, nothing.long(), nothing, LogitTail())
    (slope,) = torch.autograd.grad(found.logprobs_n.sum(), [weight])
    assert not slope.any()


def test_a_head_in_16_bits_rounds_nothing_after_the_product() -> None:
    """Logits of bfloat16 weights are float32: close to those of the same weights in float32."""
    hidden, weight = (each.detach().bfloat16() for each in made())
    tokens, heat = torch.arange(TOKENS), torch.ones(TOKENS)
    narrow, wide = (
        token_scores(h, w, None, tokens, heat, LogitTail()).logprobs_n
        for h, w in ((hidden, weight), (hidden.float(), weight.float()))
    )
    torch.testing.assert_close(narrow, wide, rtol=1e-6, atol=1e-6)


@pytest.mark.nightly
@pytest.mark.timeout(900)  # one thread, 220 s where nothing else runs
def test_memory_does_not_grow_with_the_tokens() -> None:
    """0.5 GiB are allowed for 4,096 tokens and a vocabulary of 151,936; all logits would be 2.3 GiB."""
    peaks = [
        float(subprocess.check_output([sys.executable, "-c", PEAK, str(tokens)]))
        for tokens in (512, 4096)
    ]
    assert max(peaks) < 300, peaks
    assert peaks[1] - peaks[0] < 64, peaks
