"""Replays the draws of an SGLang server with --enable-deterministic-inference. Pure tensor code.

Checked against SGLang 0.5.23 (`srt/layers/sampler.py`, `kernels/ops/sampling/murmur_hash.py`). It
draws the column with the largest log p + noise:

    noise     -log(-log(x)) in float64, x = hash / (2^32 - 1)
    hash      MurmurHash3, 32 bits, seed 0, over 16 bytes, little endian: the request's sampling_seed
              (8), the position (4), the column (4)
    position  the number of tokens before the drawn one, minus 1. The prompt counts, so an answer
              that goes on in another request keeps its positions.
    column    the token's id if no request of the batch is greedy or cuts its distribution, else
              the token's rank by falling probability. A request does not show which one was used.
    log p     at the request's temperature. Ranks that are cut off are left out; the others keep
              their p.
"""

import math

import torch
from torch import Tensor

from echo2d.core.protocol.sampling import Sampling

# Entries (rows x columns) that are hashed at once: a few tables of 16 MB exist at a time.
ENTRIES_MAX = 1 << 21

# Rounding moves the borders of top_p and min_p. A rank may be on either side of a border if the ranks before it
# have a probability this close to top_p, or if its own probability divided by the border of min_p is this close
# to 1. docs/reference/security.md has the figures.
BORDER = 0.02

_WORD = 0xFFFFFFFF
# The constants of MurmurHash3_x86_32 (Austin Appleby, public domain).
_FIRST, _SECOND, _ADDED = 0xCC9E2D51, 0x1B873593, 0xE6546B64
_MIX_FIRST, _MIX_SECOND = 0x85EBCA6B, 0xC2B2AE35


def shortfalls(
    logprobs: Tensor, tokens: Tensor, seed: int, positions: Tensor, sampling: Sampling
) -> Tensor:
    """How far, in nats, each token is from being the drawn one: float64 [rows], 0 if it is.

    For draws by id, it is the largest log p + noise minus the token's. For draws by rank, it is the smallest
    error of the log probabilities with which the token has a rank that wins. If nothing is cut off, the server
    may have drawn by id or by rank, and the smaller of the two is returned. logprobs: [rows, vocab] at this
    temperature. tokens, positions: int64 [rows].
    """
    rows = max(1, ENTRIES_MAX // logprobs.shape[1])
    parts = zip(*(torch.split(each, rows) for each in (logprobs, tokens, positions)), strict=True)
    return torch.cat([_shortfalls(part, at, seed, where, sampling) for part, at, where in parts])


def _shortfalls(
    logprobs: Tensor, tokens: Tensor, seed: int, positions: Tensor, sampling: Sampling
) -> Tensor:
    noise = gumbel_noise(seed, positions, logprobs.shape[1])
    # Infinities would give NaN below.
    levels = logprobs.to(torch.float64).clamp_min(torch.finfo(torch.float32).min)
    at = tokens[:, None]
    if sampling.cuts:
        return _by_rank(levels, levels.gather(1, at), noise, sampling)
    totals = levels + noise
    found = totals.amax(dim=-1) - totals.gather(1, at).squeeze(1)
    # Sorting takes longer than all the rest, so it is done only for the few tokens that need it.
    rows = found.nonzero().squeeze(1)
    levels = levels[rows]
    found[rows] = found[rows].minimum(
        _by_rank(levels, levels.gather(1, at[rows]), noise[rows], sampling)
    )
    return found


def _by_rank(levels: Tensor, own: Tensor, noise: Tensor, sampling: Sampling) -> Tensor:
    """The shortfalls [rows] if ranks are drawn; own: the levels [rows, 1] of the tokens."""
    ordered = levels.sort(dim=-1, descending=True).values
    totals = ordered + noise
    distances = (ordered - own).abs()
    best = totals
    if sampling.top_p < 1:
        shares = ordered.exp()
        before = shares.cumsum(dim=-1) - shares
        # The first rank begins at 0, so it is always kept.
        best = best.masked_fill(before > max(sampling.top_p - BORDER, 0.0), -torch.inf)
        distances = distances.masked_fill(before > sampling.top_p + BORDER, torch.inf)
    if sampling.top_k:
        # The kept ranks are exact. The distances tell whether the token has one of them.
        best[:, sampling.top_k :] = -torch.inf
    if sampling.min_p:
        relative = ordered - ordered[:, :1] - math.log(sampling.min_p)
        best = best.masked_fill(relative < math.log1p(BORDER), -torch.inf)
        best[:, 0] = totals[:, 0]
        distances = distances.masked_fill(relative < math.log1p(-BORDER), torch.inf)
    gaps = best.amax(dim=-1, keepdim=True) - totals
    return torch.maximum(distances, gaps).amin(dim=-1)


def gumbel_noise(seed: int, positions: Tensor, columns: int) -> Tensor:
    """SGLang's noise for each position and column: float64 [rows, columns]; positions int64."""
    numbers = murmur_hash(seed, positions, columns).to(torch.float64) / _WORD
    # The largest hash would give infinite noise; SGLang clamps it to a finite one.
    exponents = numbers.log_().clamp_(min=torch.finfo(torch.float64).min, max=-(2.0**-32))
    return exponents.neg_().log_().neg_()


def murmur_hash(seed: int, positions: Tensor, columns: int) -> Tensor:
    """MurmurHash3 over seed, position and column: int64 [rows, columns], 32 bits each.

    seed: 64 bits.
    """
    state = torch.zeros_like(positions)
    for word in (seed & _WORD, seed >> 32 & _WORD, positions & _WORD):
        state = _blended(state, torch.as_tensor(word, device=positions.device))
    hashes = _blended(state[:, None], torch.arange(columns, device=positions.device))
    hashes = hashes ^ 16
    hashes = _multiplied(hashes ^ (hashes >> 16), _MIX_FIRST)
    hashes = _multiplied(hashes ^ (hashes >> 13), _MIX_SECOND)
    return hashes ^ (hashes >> 16)


def _blended(state: Tensor, words: Tensor) -> Tensor:
    """Take the next four bytes of the message into the hash."""
    words = _multiplied(_rotated(_multiplied(words, _FIRST), 15), _SECOND)
    return (_rotated(state ^ words, 13) * 5 + _ADDED) & _WORD


def _multiplied(words: Tensor, factor: int) -> Tensor:
    # As a signed number the factor is below 2^31 in size, so the product fits into int64.
    return (words * (factor - (factor >> 31 << 32))) & _WORD


def _rotated(words: Tensor, bits: int) -> Tensor:
    return (words << bits | words >> (32 - bits)) & _WORD
