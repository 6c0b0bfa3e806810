"""Score each trajectory by the forward pass that trains it: do its logprobs and tokens fit the model?

    k   mean of |log p - q| over the tokens in the loss, in nats. Rounding and staleness alone keep it
        small; tokens or logprobs that the model did not make raise it to several nats.
    z   sum of (surprise - entropy) / square root of the sum of the surprises' variances. About
        N(0, 1) if the tokens were drawn from p, whatever q says.

p: the learner's probability of a token at the temperature of its draw, under the weights of that forward
pass. These weights differ from those that wrote the token: the token may be stale, and other parts of the
batch may have been trained before (`optimizer_steps`). Both raise an honest worker's figures, so compare
workers with each other, not with 0.

Nothing here has a gradient, and everything stays on the device until the step is over.

Suffixes of names: n = answer tokens of a micro-batch, a = its answers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from echo2d.client import TrajectoryScore
from echo2d.learner.batch.packing import MicroBatch
from echo2d.learner.model.logprobs import TokenScores


@dataclass(frozen=True, slots=True)
class ScoreSums:
    """Sums over the tokens of each answer of a micro-batch."""

    trajectories: Sequence[tuple[int, int]]  # the group of each answer, and its number there
    sums: Tensor  # [4, a]: tokens, |log p - q|, surprise - entropy, variance of the surprise


@torch.no_grad()
def score_sums(micro: MicroBatch, scores: TokenScores) -> ScoreSums:
    """Add up one micro-batch."""
    logprobs_n, entropy_n, variance_n = scores
    device = logprobs_n.device
    answers_n = torch.from_numpy(micro.answers_n).to(device)
    rollout_n = torch.from_numpy(micro.rollout_logprobs_n).to(device)
    facts = torch.stack(
        [
            torch.ones_like(logprobs_n),
            (logprobs_n - rollout_n).abs(),
            -logprobs_n - entropy_n,
            variance_n,
        ]
    )
    sums = torch.zeros(len(facts), micro.answers, device=device).index_add_(1, answers_n, facts)
    return ScoreSums(micro.trajectories, sums)


def no_sums(device: torch.device) -> ScoreSums:
    """The sums of a micro-batch that has no answers."""
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
