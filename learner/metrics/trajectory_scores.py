"""Score each trajectory by the forward pass that trains it: do its logprobs and tokens fit the model?

    k   mean of |log p - q| over the tokens in the loss, in nats. Rounding and staleness keep it
        small; tokens or logprobs that the model did not make are nats away.
    z   sum of (surprise - entropy) / square root of the sum of the surprises' variances. About
        N(0, 1) if the tokens were drawn from p, whatever q says.

p: a token's probability by the learner at the temperature of its draw, under the weights of that forward
pass. Older weights wrote the token (staleness), and other parts of the batch may have been trained
on before (`optimizer_steps`), so an honest worker's figures grow with both: compare workers with
each other, not with 0.

k comes from the log p of the loss. z needs the whole distribution of a token, which the loss has
too, as log p over the vocabulary; reading it again for every token would still cost some percent of
a step with a large vocabulary on a fast device. So z is that of at most Z_TOKENS tokens of a
trajectory, drawn by chance, which a worker cannot foresee.

Everything is without gradient, and stays on the device until the step is over.

Suffixes of names: n = answer tokens of a micro-batch, m = those of them that z is made of, v =
vocabulary, a = its answers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echo2d.client import TrajectoryScore
from learner.batch.packing import MicroBatch

# Made-up tokens are found in a dozen; so many also show a worker that chooses among likely ones.
Z_TOKENS = 128
# Values of the distributions that are read at once, by device: 4 MB stay in a CPU's cache. Others
# start several kernels for each 64 MB.
CHUNK_VALUES = {"cpu": 1 << 20}
CHUNK_VALUES_ELSEWHERE = 1 << 24


@dataclass(frozen=True, slots=True)
class ScoreSums:
    """Sums over the tokens of each answer of a micro-batch; `trajectories` names the answers.

    sums [4, a]: tokens, |log p - q|, surprise - entropy, variance of the surprise.
    """

    trajectories: Sequence[tuple[int, int]]
    sums: Tensor


@torch.no_grad()
def score_sums(
    micro: MicroBatch, everything_nv: Tensor, logprobs_n: Tensor, rng: np.random.Generator
) -> ScoreSums:
    """Add up one micro-batch.

    everything_nv: log p of the whole vocabulary, float32. logprobs_n: log p of the tokens. rng:
    draws the tokens that z is made of.
    """
    device = logprobs_n.device
    answers_n = torch.from_numpy(micro.answers_n).to(device)
    error_n = (logprobs_n - torch.from_numpy(micro.rollout_logprobs_n).to(device)).abs()
    places = drawn(micro.answers_n, rng)
    places_m = None if places is None else torch.from_numpy(places).to(device)
    entropy_m, variance_m = surprise_moments(everything_nv, places_m)
    answers_m, logprobs_m = answers_n, logprobs_n
    if places_m is not None:
        answers_m, logprobs_m = answers_n[places_m], logprobs_n[places_m]
    excess_m = -logprobs_m - entropy_m
    sums = torch.zeros(4, micro.answers, device=device)
    sums[:2].index_add_(1, answers_n, torch.stack([torch.ones_like(error_n), error_n]))
    sums[2:].index_add_(1, answers_m, torch.stack([excess_m, variance_m]))
    return ScoreSums(micro.trajectories, sums)


def drawn(answers_n: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64] | None:
    """The places [m] of the tokens that z is made of: Z_TOKENS of each answer, or all that it has.
    None: all tokens.

    answers_n: the answer of each token, ascending.
    """
    lengths = np.bincount(answers_n)
    if lengths.max() <= Z_TOKENS:
        return None
    starts = np.cumsum(lengths) - lengths
    return np.concatenate(
        [
            start + np.sort(rng.permutation(length)[:Z_TOKENS])
            for start, length in zip(starts, lengths, strict=True)
        ]
    )


def surprise_moments(everything_nv: Tensor, places_m: Tensor | None) -> tuple[Tensor, Tensor]:
    """The mean (entropy) and the variance of the surprise -log p at these places, each [m].

    places_m: None: everywhere.
    """
    values = CHUNK_VALUES.get(everything_nv.device.type, CHUNK_VALUES_ELSEWHERE)
    rows = max(1, values // everything_nv.shape[1])
    # Slices are read where they are; other places are copied.
    parts = (
        torch.split(everything_nv, rows)
        if places_m is None
        else (everything_nv[part] for part in torch.split(places_m, rows))
    )
    entropies, variances = [], []
    for part_mv in parts:
        # p log p, then p (log p)^2, in one buffer.
        weighted_mv = part_mv.exp().mul_(part_mv)
        entropy_m = -weighted_mv.sum(1)
        entropies.append(entropy_m)
        variances.append(weighted_mv.mul_(part_mv).sum(1) - entropy_m.square())
    return torch.cat(entropies), torch.cat(variances).clamp_(min=0.0)


def no_sums(device: torch.device) -> ScoreSums:
    """Of a micro-batch without answers."""
    return ScoreSums((), torch.zeros(4, 0, device=device))


def scores_of(found: Sequence[ScoreSums]) -> list[TrajectoryScore]:
    """The score of every answer; those that are not finite are left out."""
    columns = torch.cat([each.sums for each in found], dim=1).T.tolist()
    names = [name for each in found for name in each.trajectories]
    scores = [
        TrajectoryScore(
            *name, k=error / tokens, z=excess / math.sqrt(variance) if variance else 0.0
        )
        for name, (tokens, error, excess, variance) in zip(names, columns, strict=True)
    ]
    return [score for score in scores if math.isfinite(score.k) and math.isfinite(score.z)]
