"""The noise with which SGLang draws. `tests/nightly/sglang/test_replay.py` compares it with SGLang itself."""

import math

import pytest
import torch

from echo2d.core.protocol.sampling import WHOLE, Sampling
from echo2d.engines.torch_engine import gumbel
from echo2d.engines.torch_engine.gumbel import gumbel_noise, murmur_hash, shortfalls

SEEDS = (0, 1, 42, 2**31 - 1, 2**63 - 1)
POSITIONS = (0, 1, 7, 100_000, 2**31 - 1)
COLUMNS = (0, 1, 2, 49_151, 151_935)
# SGLang 0.5.23's own kernel in Triton's interpreter: seeds and positions in pairs, by columns.
HASHES = [
    [2167721464, 10027521, 2423355346, 2764360731, 1065631903],
    [690670310, 2322861649, 3012936811, 3617577762, 754129545],
    [1713287821, 2249025004, 521978470, 2830990073, 2377481450],
    [296828312, 4199701413, 1996648594, 189117109, 3938256699],
    [1367382394, 1259439722, 1321296111, 1138153810, 3190621704],
]
VOCAB = 50
ROWS = 400


def logprobs_of(rows: int, spread: float = 2.0) -> torch.Tensor:
    random = torch.Generator().manual_seed(0)
    return torch.log_softmax(spread * torch.randn(rows, VOCAB, generator=random), dim=-1)


def drawn(logprobs: torch.Tensor, seed: int, *, by_rank: bool, top_p: float = 1.0) -> torch.Tensor:
    """The tokens of positions 0, 1, ...: the straightforward way."""
    noise = gumbel_noise(seed, torch.arange(len(logprobs)), VOCAB)
    if not by_rank:
        return (logprobs + noise).argmax(dim=-1)
    chances, order = logprobs.exp().sort(dim=-1, descending=True)
    chances[chances.cumsum(dim=-1) - chances > top_p] = 0.0
    return order.gather(1, (chances.log() + noise).argmax(dim=-1, keepdim=True)).squeeze(1)


def test_the_hash_equals_sglangs() -> None:
    found = [
        murmur_hash(seed, torch.tensor([position]), COLUMNS[-1] + 1)[0, list(COLUMNS)].tolist()
        for seed, position in zip(SEEDS, POSITIONS, strict=True)
    ]
    assert found == HASHES


def test_noise_is_finite_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = torch.tensor([[0, 1, 1 << 31, 0xFFFFFFFE, 0xFFFFFFFF]])
    monkeypatch.setattr(gumbel, "murmur_hash", lambda *_: ends)
    least, small, middle, large, largest = gumbel_noise(0, torch.tensor([0]), 5)[0].tolist()
    assert small == pytest.approx(-math.log(math.log(0xFFFFFFFF)))
    assert middle == pytest.approx(-math.log(math.log(2)))
    assert least < -700
    assert largest == pytest.approx(large) == pytest.approx(32 * math.log(2))


@pytest.mark.parametrize("by_rank", [False, True])
def test_drawn_tokens_follow_the_distribution(by_rank: bool) -> None:
    """Pearson's statistic: 49 degrees of freedom, below 110 but once in a million times."""
    rows = 20_000
    logprobs = logprobs_of(1, spread=1.0).expand(rows, VOCAB).contiguous()
    counts = torch.bincount(drawn(logprobs, 5, by_rank=by_rank), minlength=VOCAB)
    expected = rows * logprobs[0].exp()
    assert float(((counts - expected).square() / expected).sum()) < 110


@pytest.mark.parametrize(("by_rank", "top_p"), [(False, 1.0), (True, 1.0), (True, 0.8)])
def test_the_drawn_token_has_the_largest_noise_and_all_others_lack_some(
    by_rank: bool, top_p: float
) -> None:
    logprobs, positions = logprobs_of(ROWS), torch.arange(ROWS)
    tokens = drawn(logprobs, 9, by_rank=by_rank, top_p=top_p)
    assert float(shortfalls(logprobs, tokens, 9, positions, Sampling(top_p=top_p)).max()) < 1e-6
    others = drawn(logprobs, 10, by_rank=by_rank, top_p=top_p)
    far = shortfalls(logprobs, others, 9, positions, Sampling(top_p=top_p))
    assert (far[others != tokens] > 0.1).float().mean() > 0.7


def test_a_token_beyond_top_p_is_never_the_drawn_one() -> None:
    logprobs = logprobs_of(ROWS)
    least = logprobs.argmin(dim=-1)
    far = shortfalls(logprobs, least, 9, torch.arange(ROWS), Sampling(top_p=0.5))
    assert float(far.min()) > 0.1


@pytest.mark.parametrize("by_rank", [False, True])
def test_an_error_in_log_p_costs_at_most_twice_itself(by_rank: bool) -> None:
    logprobs, error = logprobs_of(ROWS), 0.05
    random = torch.Generator().manual_seed(1)
    wrong = logprobs + error * (2 * torch.rand(ROWS, VOCAB, generator=random) - 1)
    wrong = torch.log_softmax(wrong, dim=-1)
    tokens = drawn(wrong, 9, by_rank=by_rank)
    far = shortfalls(logprobs, tokens, 9, torch.arange(ROWS), WHOLE)
    assert float(far.max()) <= 2 * error


def test_the_size_of_the_tables_changes_no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    logprobs, tokens, positions = logprobs_of(7), torch.arange(7), torch.arange(7)
    whole = shortfalls(logprobs, tokens, 9, positions, WHOLE)
    for entries in (1, 3 * VOCAB):
        monkeypatch.setattr(gumbel, "ENTRIES_MAX", entries)
        assert torch.equal(shortfalls(logprobs, tokens, 9, positions, WHOLE), whole)


def test_impossible_tokens_have_finite_noise() -> None:
    logprobs = torch.tensor([[0.0, -torch.inf, -torch.inf]])
    at = torch.tensor([0])
    assert float(shortfalls(logprobs, torch.tensor([0]), 9, at, WHOLE)) == 0
    assert float(shortfalls(logprobs, torch.tensor([1]), 9, at, WHOLE)) > 1e9
