"""Measure importance ratios, clipping and rewards of a train step by staleness.

Tokens are grouped by their own staleness, answers (reward, length) by that of their oldest token. A
tally holds only sums and maxima, so that tallies of micro-batches and ranks can be combined. It stays
on the device until the step is over.

Suffixes of names: n = answer tokens of a micro-batch, s = staleness 0, 1, ...
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from echo2d.client import Batch
from echo2d.learner.batch.checks import staleness
from echo2d.learner.ranks.ranks import Ranks

SUMS = ("tokens", "ratio", "clipped", "corrected", "kl", "entropy", "kl_base", "kl_teacher")


@dataclass(frozen=True, slots=True)
class Tally:
    """sums_s [len(SUMS), s], ratio_max_s [s] and loss, a scalar."""

    sums_s: Tensor
    ratio_max_s: Tensor
    loss: Tensor


def tally(
    loss: Tensor,
    entropy_n: Tensor,
    log_ratio_n: Tensor,
    keeps_n: Tensor,
    corrected_n: Tensor,
    staleness_n: Tensor,
    count: int,
    base_distance_n: Tensor | None = None,
    teacher_lead_n: Tensor | None = None,
) -> Tally:
    """Tally one micro-batch for staleness 0 to count - 1.

    kl is k3 = rho - 1 - log rho of Schulman ("Approximating KL divergence", 2020): under samples of
    the rollout its mean estimates KL(rollout || learner), is never negative, and has little
    variance. base_distance_n: the tokens' KL terms of the loss (`distance_to_base`). teacher_lead_n:
    log(teacher / p), whose negative is k1 of KL(learner || teacher). Without one of these its sum is NaN.
    """
    ratio_n = log_ratio_n.exp()
    kl_n = ratio_n - 1.0 - log_ratio_n
    absent_n = torch.full_like(ratio_n, torch.nan)
    facts = (
        torch.ones_like(ratio_n),
        ratio_n,
        ~keeps_n,
        corrected_n,
        kl_n,
        entropy_n.detach(),
        absent_n if base_distance_n is None else base_distance_n.detach(),
        absent_n if teacher_lead_n is None else -teacher_lead_n,
    )
    is_of_ns = torch.nn.functional.one_hot(staleness_n, count).to(ratio_n.dtype)
    sums_s = torch.stack([fact.to(ratio_n.dtype) for fact in facts]) @ is_of_ns
    return Tally(sums_s, (ratio_n[:, None] * is_of_ns).amax(0), loss.detach())


def add_up(tallies: Sequence[Tally]) -> Tally:
    return Tally(
        torch.stack([each.sums_s for each in tallies]).sum(0),
        torch.stack([each.ratio_max_s for each in tallies]).amax(0),
        torch.stack([each.loss for each in tallies]).sum(),
    )


def empty_tally(count: int, device: torch.device) -> Tally:
    """The tally of a micro-batch without answers."""
    zeros_s = torch.zeros(count, device=device)
    return Tally(zeros_s.expand(len(SUMS), count), zeros_s, zeros_s.sum())


def over_ranks(tallied: Tally, ranks: Ranks) -> Tally:
    """Combine the tallies of all ranks, on every rank."""
    sums = ranks.add_up(torch.cat([tallied.sums_s.flatten(), tallied.loss[None]]))
    return Tally(
        sums[:-1].view_as(tallied.sums_s), ranks.maxima(tallied.ratio_max_s.clone()), sums[-1]
    )


@dataclass(frozen=True, slots=True)
class Means:
    """Means over tokens."""

    tokens: int
    ratio_mean: float
    ratio_max: float
    clip_share: float  # share of tokens that the clip dropped
    corrected_share: float  # share of tokens whose ratio the correction changed
    kl: float  # KL(rollout || learner), in nats
    entropy: float  # of the whole distributions that the tokens were drawn from, in nats
    kl_base: float | None = None  # KL(learner || base), in nats; None if kl_coef is 0
    kl_teacher: float | None = None  # KL(learner || teacher), in nats; None: there is no teacher


NO_TOKENS = Means(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def overall(tallied: Tally) -> Means:
    return _means(tallied.sums_s.sum(1).tolist(), float(tallied.ratio_max_s.max()))


def by_staleness(tallied: Tally) -> dict[int, Means]:
    """Means for each staleness that any token has."""
    columns = zip(tallied.sums_s.T.tolist(), tallied.ratio_max_s.tolist(), strict=True)
    return {
        place: _means(sums, largest) for place, (sums, largest) in enumerate(columns) if sums[0]
    }


def _means(sums: Sequence[float], ratio_max: float) -> Means:
    tokens, *others = sums
    ratio, clipped, corrected, kl, entropy, *references = (each / tokens for each in others)
    known = (None if math.isnan(each) else each for each in references)
    return Means(round(tokens), ratio, ratio_max, clipped, corrected, kl, entropy, *known)


def answers_by_staleness(batch: Batch) -> dict[int, dict[str, float]]:
    """The number of trajectories of each staleness, with their mean reward and mean length in
    written tokens.
    """
    found: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for group in batch.groups:
        for each in group.trajectories:
            found[staleness(each, batch.step)].append((each.reward, int(each.written.sum())))
    return {key: _answers(found[key]) for key in sorted(found)}


def _answers(facts: Sequence[tuple[float, int]]) -> dict[str, float]:
    rewards, lengths = zip(*facts, strict=True)
    return {
        "answers": len(facts),
        "reward": sum(rewards) / len(facts),
        "length": sum(lengths) / len(facts),
    }
