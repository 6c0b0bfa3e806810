"""The datums of a call: after they were checked, in the rows in which they are computed; and how old their tokens are.
Drawn sequences are read as datums, too.

The staleness of a sampled token is the number of optimizer steps between the weights that drew it and those it trains.
A sequence is named `SESSION:sample:N/NUMBER/I@M.STEPS` if its sampler has the weights of model SESSION:train:M after
STEPS optimizer steps, or newer ones. A client says of each target which sequence it comes from, if its loss needs it.

Suffixes of names: b = rows of a micro-batch, t = positions, n = targets of a micro-batch, one datum after the other, v
= vocabulary, k = the most likely tokens.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echo2d.learner.batch.packing import Pieces, best_fit
from echo2d.learner.model.scorer import AnswerScorer
from echo2d.tinker.prompts import MostLikely
from echo2d.tinker.wire import Datum, SampledTokens

# In a micro-batch, this many targets take as much room as one token: a token has activations of all layers.
TARGETS_PER_TOKEN = 8
_SEQUENCE = re.compile(r"([A-Za-z0-9-]{1,64}):sample:[0-9/]{1,64}@([0-9]{1,9})\.([0-9]{1,9})")


@dataclass(frozen=True, slots=True)
class CheckedDatum:
    """A datum that can be computed."""

    tokens_t: NDArray[np.int64]
    targets: NDArray[np.int64]  # [t], or several for each token [t, k]
    given: Mapping[str, NDArray[np.float32]]  # for each target

    @property
    def width(self) -> int:
        """Its room in a row, in tokens."""
        return max(len(self.tokens_t), self.targets.size // TARGETS_PER_TOKEN)

    @property
    def empty(self) -> "CheckedDatum":
        """A datum without targets, for the same loss."""
        given = {name: np.zeros(0, np.float32) for name in self.given}
        return CheckedDatum(np.zeros(1, np.int64), np.zeros((1, 0), np.int64), given)


@dataclass(frozen=True, slots=True)
class LaidOut:
    """One forward pass: a row of pieces, or padded rows of one datum each."""

    tokens_bt: NDArray[np.int64]
    places_n: NDArray[np.int64]  # the token that each target belongs to
    positions_bt: NDArray[np.int64] | None
    pieces: Pieces | None


def laid_out(row: Sequence[CheckedDatum], *, packed: bool) -> LaidOut:
    lengths = np.array([len(each.tokens_t) for each in row])
    width = int(lengths.sum() if packed else lengths.max())
    starts = lengths.cumsum() - lengths if packed else np.arange(len(row)) * width
    positions = [np.arange(length) for length in lengths]
    tokens = np.zeros((1 if packed else len(row)) * width, dtype=np.int64)
    places = []
    for start, each, position in zip(starts, row, positions, strict=True):
        tokens[start + position] = each.tokens_t
        places.append(np.repeat(start + position, each.targets.size // len(position)))
    nothing = np.zeros_like(lengths)
    return LaidOut(
        tokens.reshape(-1, width),
        np.concatenate(places),
        np.concatenate(positions)[None] if packed else None,
        Pieces(starts, lengths, nothing, nothing) if packed else None,
    )


def rows_of(
    data: Sequence[CheckedDatum], tokens_max: int, ranks: int, *, packed: bool
) -> list[list[int]]:
    """The data of each micro-batch, by their places. Rank r of this many runs each of [r::ranks]. Only a row of one
    datum is wider than `tokens_max`. packed: whether datums share a row of the model.
    """
    order = sorted(range(len(data)), key=lambda place: data[place].width, reverse=True)
    # So that no rank has nothing to do while another one runs a full row.
    most = min(tokens_max, max(1, -(-sum(each.width for each in data) // ranks)))
    if packed:
        return best_fit([(data[place].width, place) for place in order], most)
    rows = []
    while order:
        count = max(1, most // data[order[0]].width)
        rows.append(order[:count])
        order = order[count:]
    return rows


def with_top_tokens(
    scorer: AnswerScorer,
    drawn: Sequence[SampledTokens],
    behind: Sequence[NDArray[np.int64]],
    top_tokens: int,
    temperature: float,
    row_tokens: int,
) -> list[SampledTokens]:
    """The sequences with the most likely tokens at each of their positions.

    behind: the tokens of each sequence behind those of its prompt. temperature: that of the draw, at which the logprobs
    are; 0 counts as 1, as engines have it. row_tokens: of a row of several sequences, at most.
    """
    data, told = [CheckedDatum(each, each, {}) for each in behind], list(drawn)
    parts: list[tuple[Tensor, Tensor]] = []

    def read(logits_nv: Tensor) -> None:
        logits_nv = logits_nv / (temperature or 1.0)
        top_nk, tokens_nk = logits_nv.topk(top_tokens)
        normalizer_n = logits_nv.logsumexp(1, keepdim=True)
        parts.append((tokens_nk.int().cpu(), (top_nk - normalizer_n).cpu()))

    for row in rows_of(data, row_tokens, 1, packed=scorer.packed):
        micro = laid_out([data[place] for place in row], packed=scorer.packed)
        counts = [len(drawn[place].tokens) // 4 for place in row]
        ends = np.cumsum([len(behind[place]) for place in row]) - 1
        sampled_n = np.concatenate(list(map(np.arange, ends - counts, ends)))
        places_n = micro.places_n[sampled_n]
        scorer.read_logits(micro.tokens_bt, places_n, micro.positions_bt, micro.pieces, read)
        found = (torch.cat(each).numpy() for each in zip(*parts, strict=True))
        tops = (np.split(each, np.cumsum(counts)[:-1]) for each in found)
        for place, top in zip(row, map(MostLikely, *tops), strict=True):
            told[place] = replace(drawn[place], top=top)
        parts.clear()
    return told


def staleness_of(data: Iterable[Datum], model: str, steps: int) -> list[tuple[int, int]]:
    """For each span of sampled tokens, its staleness in optimizer steps, and how many tokens it has.

    model: whose sequences count. steps: how many steps it has had.
    """
    found = []
    for span in (each for datum in data for each in datum.spans if each.sampled and each.length):
        named = _SEQUENCE.fullmatch(span.sequence)
        if named is not None and f"{named[1]}:train:{named[2]}" == model:
            found.append((max(0, steps - int(named[3])), span.length))
    return found


def staleness_metrics(found: Iterable[tuple[int, int]]) -> dict[str, float]:
    """Named as the API wants it: the mean over tokens, and the largest."""
    tokens = sum(length for _, length in found)
    if not tokens:
        return {}
    total = sum(staleness * length for staleness, length in found)
    return {
        "staleness:mean": total / tokens,
        "staleness:max": float(max(staleness for staleness, _ in found)),
    }
