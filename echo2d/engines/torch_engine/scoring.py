"""Scores answers of other engines: one prefill, no generation.

For each token of an answer it computes how likely the token was, and the average surprise of a sampler at that
place. Given the sample's seed, it also computes whether an honest engine would have drawn this token (replay):

    torch    the token's part of the cumulated distribution of `sampling` contains u(seed, i), where i
             counts from the answer's first token
    sglang   the token has the largest log p + noise, see `gumbel`

Rounding moves the borders, so a token may miss by a tolerance. Tensor code around one forward pass
of a policy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echo2d.core.protocol.evidence import COLD, HOT, Evidence, evidence
from echo2d.core.protocol.experts import ExpertShape
from echo2d.core.protocol.sampling import Sampling
from echo2d.core.protocol.seeds import SGLANG_SEED_MASK, uniforms
from echo2d.engines.torch_engine.gumbel import shortfalls
from echo2d.engines.torch_engine.policy import InferencePolicy
from echo2d.engines.torch_engine.sampling import chances_of

Replay = Literal["torch", "sglang"]

# Logits of this many positions are turned into distributions at once. For a vocabulary of 150k that
# is a table of 160 MB in float64; a few of them exist at a time.
POSITIONS_MAX = 128

# The narrowest of TOLERANCES: how far u may be outside a token's part of [0, 1), and how many nats a token may
# be below the best log p + noise. docs/reference/security.md has the figures.
UNIFORM_TOLERANCE = 0.02
NATS_TOLERANCE = 0.4


@dataclass(frozen=True, slots=True, eq=False)
class ScoredAnswer:
    """What a policy computes for the tokens of an answer; every array is [n], float64."""

    # Logprobs of the full distribution at this temperature, as engines report them.
    logprobs: NDArray[np.float64]
    # Minus the logprob in the distribution from which tokens are drawn. A token that the sampling cuts off
    # counts as if it were kept, because rounding moves that border.
    surprises: NDArray[np.float64]
    # Mean and variance of the surprise at each token.
    entropies: NDArray[np.float64]
    variances: NDArray[np.float64]
    # Each token's term in the sum of the same name in `Evidence`.
    colds: NDArray[np.float64]
    hots: NDArray[np.float64]
    # How far each token is from the one that its seed gives, in tolerances; None without replay.
    distances: NDArray[np.float64] | None = None
    experts: NDArray[Any] | None = (
        None  # those of each token [n, layers, chosen]; None: a dense model
    )

    def evidence(
        self,
        claimed: NDArray[np.float64],
        experts: NDArray[Any] | None = None,
        shape: ExpertShape | None = None,
    ) -> Evidence:
        """Sum up the tokens. claimed, experts: the logprobs [n] and the experts that the worker reported. shape: what
        the experts of a token may be.
        """
        return evidence(
            self.logprobs,
            claimed,
            surprises=self.surprises,
            entropies=self.entropies,
            variances=self.variances,
            colds=self.colds,
            hots=self.hots,
            distances=self.distances,
            rerouted=0.0
            if experts is None or self.experts is None or shape is None
            else shape.differing(experts, self.experts),
        )


@dataclass(frozen=True, slots=True)
class Scorable:
    """An answer, or a piece of one; prompt and answer have at least one token each."""

    prompt: Sequence[int]  # all tokens before the scored ones
    answer: Sequence[int]
    seed: int | None = None  # seed of the sample; None: no replay
    written: int = 0  # how many of the prompt's tokens were drawn with the seed already


def score(
    policy: InferencePolicy,
    prompt: Sequence[int],
    answer: Sequence[int],
    *,
    sampling: Sampling,
    seed: int | None = None,
    written: int = 0,
    replay: Replay = "torch",
) -> ScoredAnswer:
    """Score one answer; the arguments are those of `Scorable` and `score_all`."""
    asked = [Scorable(prompt, answer, seed, written)]
    (scored,) = score_all(policy, asked, sampling=sampling, replay=replay)
    return scored


def score_all(
    policy: InferencePolicy,
    asked: Sequence[Scorable],
    *,
    sampling: Sampling,
    replay: Replay = "torch",
    adapter: str = "",
) -> list[ScoredAnswer]:
    """Score answers in one forward pass, padded to the longest. The caller makes sure that they fit in memory.

    sampling: how all of them were drawn; its temperature is above 0, because a greedy answer has no
    distribution. replay: the kind of engine that wrote the answers. adapter: as in `InferencePolicy.logits`.
    """
    assert sampling.temperature > 0
    assert all(each.prompt and each.written >= 0 and each.answer for each in asked)
    with torch.inference_mode():
        rows, chosen = _answer_logits(policy, asked, adapter)
        lines = [
            _Line(token, len(each.prompt) - 1 + at, each.written + at, each.seed)
            for each in asked
            for at, token in enumerate(each.answer)
        ]
        columns, distances = [], []
        for start in range(0, len(lines), POSITIONS_MAX):
            end = start + POSITIONS_MAX
            part = _Part(rows[start:end], lines[start:end], sampling)
            columns.append(part.facts())
            if lines[0].seed is not None:
                distances.append(part.outside() if replay == "torch" else part.shortfalls())
        facts = torch.cat(columns, dim=1).cpu().numpy()
        far = torch.cat(distances).cpu().numpy() if distances else None
    tolerance = UNIFORM_TOLERANCE if replay == "torch" else NATS_TOLERANCE
    scored, start = [], 0
    for each in asked:
        own = slice(start, start + len(each.answer))
        mine = None if far is None else far[own] / tolerance
        experts = None if chosen is None else chosen[own]
        logprobs, surprises, entropies, variances, colds, hots = facts[:, own]
        scored.append(
            ScoredAnswer(logprobs, surprises, entropies, variances, colds, hots, mine, experts)
        )
        start = own.stop
    return scored


def _answer_logits(
    policy: InferencePolicy, asked: Sequence[Scorable], adapter: str
) -> tuple[Tensor, NDArray[Any] | None]:
    """The logits of every answer token [tokens, vocab], answer by answer, and the experts that were chosen on the way
    [tokens, layers, chosen].
    """
    longest = max(len(each.prompt) + len(each.answer) for each in asked)
    padded = [
        [*each.prompt, *each.answer, *[0] * (longest - len(each.prompt) - len(each.answer))]
        for each in asked
    ]
    tokens = torch.tensor(padded, dtype=torch.int64, device=policy.device)
    # The logits at a position are those of the next token. Later tokens cannot change them, so padding
    # on the right does no harm.
    first = min(len(each.prompt) for each in asked) - 1
    logits = policy.logits(tokens, longest - first, adapter)
    experts = policy.experts(len(asked), longest - first)
    starts = [len(each.prompt) - 1 - first for each in asked]

    def own(table: Tensor) -> Tensor:
        return torch.cat(
            [
                table[row, start : start + len(each.answer)]
                for row, (start, each) in enumerate(zip(starts, asked, strict=True))
            ]
        )

    return own(logits), None if experts is None else own(experts).cpu().numpy()


class _Line(NamedTuple):
    """A token of an answer."""

    token: int
    position: int  # number of tokens before it, minus 1
    place: int  # index within the whole answer
    seed: int | None


class _Part:
    """The distributions of at most POSITIONS_MAX tokens."""

    def __init__(self, logits: Tensor, lines: Sequence[_Line], sampling: Sampling) -> None:
        self._logprobs, weights = chances_of(logits, [sampling] * len(lines))
        self._total = weights.sum(dim=-1, keepdim=True)
        self._shares = weights / self._total
        self._tokens = torch.tensor([line.token for line in lines], device=logits.device)
        self._lines = lines
        self._sampling = sampling

    def facts(self) -> Tensor:
        """The first six arrays of a ScoredAnswer, stacked [6, rows]."""
        own = self._own(self._logprobs).to(torch.float64)
        drawn = self._shares.clamp_min(torch.finfo(torch.float64).tiny).log()
        entropies = -(self._shares * drawn).sum(dim=-1)
        variances = (self._shares * drawn.square()).sum(dim=-1) - entropies.square()
        surprises = self._total.log().squeeze(1) - own
        # log of p^b / sum(p^b) over p, at the token.
        ratios = [
            (1 - power) * surprises - torch.logsumexp(power * drawn, dim=-1)
            for power in (COLD, HOT)
        ]
        return torch.stack([own, surprises, entropies, variances.clamp_min(0.0), *ratios])

    def outside(self) -> Tensor:
        """How far u is outside each token's part of [0, 1): float64 [rows], 0 inside."""
        seeds, places = zip(*((line.seed, line.place) for line in self._lines), strict=True)
        numbers = torch.from_numpy(uniforms(seeds, places)).to(self._shares.device)
        highs = self._own(self._shares.cumsum(dim=-1))
        lows = highs - self._own(self._shares)
        return torch.maximum(lows - numbers, numbers - highs).clamp_min(0.0)

    def shortfalls(self) -> Tensor:
        """The nats of `gumbel.shortfalls`: float64 [rows]."""
        found, start = [], 0
        for seed, same in groupby(self._lines, key=lambda line: line.seed):
            assert seed is not None
            positions = torch.tensor([line.position for line in same], device=self._tokens.device)
            own = slice(start, start + len(positions))
            found.append(
                shortfalls(
                    self._logprobs[own],
                    self._tokens[own],
                    seed & SGLANG_SEED_MASK,
                    positions,
                    self._sampling,
                )
            )
            start = own.stop
        return torch.cat(found)

    def _own(self, table: Tensor) -> Tensor:
        return table.gather(1, self._tokens[:, None]).squeeze(1)
