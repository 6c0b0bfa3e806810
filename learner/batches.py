"""What may be trained: the check of a batch of the coordinator.

The learner believes nothing: `faults` checks every span of every trajectory (I1, I5), and a group with a fault is
refused, never trained. With `masks`, I1 holds per token: a group may come if its newest token is fresh enough, and its
tokens that are not are read by the model and left out of the loss. Not here: how it is laid out (`packing`).
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from echo2d.client import Batch, Group, PeerFault, Span, Trajectory

LOGPROB_MAX = 1e-4  # log of a probability, and a little rounding
REWARD_MAX = 1e15  # of a reward's size: float32 still has its square
TRAINED_MAX = 1 << 14  # groups: hundreds of steps


@dataclass(frozen=True, slots=True)
class BatchRules:
    """What the session promises of every batch. masks: over_stale is "mask"."""

    staleness_max: int
    groups: int
    group_size: int
    vocab_size: int
    masks: bool = False

    def fresh(self, span: Span, step: int) -> bool:
        """Whether this step may train on the span's tokens."""
        return (step - 1) - span.version <= self.staleness_max


class Trained:
    """The groups that this learner has trained, and in which step: none comes again (I4). The newest are known.

    steps: by group; those of a checkpoint that it goes on from.
    """

    def __init__(self, steps: Mapping[int, int] | None = None) -> None:
        self._steps = dict(steps or {})

    @property
    def steps(self) -> dict[int, int]:
        return dict(self._steps)

    def add(self, batch: Batch) -> None:
        self._steps.update((group.group_id, batch.step) for group in batch.groups)
        while len(self._steps) > TRAINED_MAX:
            del self._steps[next(iter(self._steps))]

    def fault(self, group_id: int) -> str:
        step = self._steps.get(group_id)
        return "" if step is None else f"it was trained in step {step}"


def faults(batch: Batch, step: int, rules: BatchRules, trained: Trained) -> dict[int, str]:
    """Why groups may not be trained in this step, by group id; empty where all may.

    PeerFault: another step or another number of groups. No refusal mends that.
    """
    if batch.step != step or len(batch.groups) != rules.groups:
        asked, came = (
            f"batch {step} of {rules.groups} groups",
            f"batch {batch.step} of {len(batch.groups)}",
        )
        raise PeerFault(f"asked for {asked}; got {came}")
    found: dict[int, str] = {}
    seen: set[int] = set()
    for group in batch.groups:
        again = (
            "it is in the batch twice" if group.group_id in seen else trained.fault(group.group_id)
        )
        if fault := again or _group_fault(group, step, rules):
            found[group.group_id] = fault
        seen.add(group.group_id)
    return found


def staleness(trajectory: Trajectory, step: int) -> int:
    """Train steps between its oldest token's version and the weights that `step` trains."""
    version_min: int = min(span.version for span in trajectory.spans)
    return (step - 1) - version_min


def staleness_histogram(batch: Batch) -> dict[int, int]:
    """How many trajectories have which staleness."""
    counts = Counter(
        staleness(trajectory, batch.step)
        for group in batch.groups
        for trajectory in group.trajectories
    )
    return dict(sorted(counts.items()))


def _group_fault(group: Group, step: int, rules: BatchRules) -> str:
    if len(group.trajectories) != rules.group_size:
        return f"{len(group.trajectories)} trajectories of {rules.group_size}"
    if len(group.prompt) == 0 or not _in_vocabulary(group.prompt, rules.vocab_size):
        return "a prompt that is empty or leaves the vocabulary"
    for index, trajectory in enumerate(group.trajectories):
        if fault := _trajectory_fault(trajectory, step, rules):
            return f"trajectory {index}: {fault}"
    if not any(
        rules.fresh(span, step) for trajectory in group.trajectories for span in trajectory.spans
    ):
        return f"no token with staleness up to {rules.staleness_max}"
    return ""


def _trajectory_fault(trajectory: Trajectory, step: int, rules: BatchRules) -> str:
    length = len(trajectory.tokens)
    if length == 0 or not _in_vocabulary(trajectory.tokens, rules.vocab_size):
        return "tokens that are missing or leave the vocabulary"
    if len(trajectory.logprobs) != length:
        return f"{len(trajectory.logprobs)} logprobs of {length} tokens"
    if not (np.isfinite(trajectory.logprobs) & (trajectory.logprobs <= LOGPROB_MAX)).all():
        return "a logprob that is none"
    if not abs(trajectory.reward) <= REWARD_MAX:
        return f"reward {trajectory.reward}"
    edges = [0, *(edge for span in trajectory.spans for edge in (span.start, span.end)), length]
    if edges[::2] != edges[1::2] or any(span.start >= span.end for span in trajectory.spans):
        return f"spans that do not cover its {length} tokens"
    for span in trajectory.spans:
        if span.version > step - 1 or not (rules.masks or rules.fresh(span, step)):
            return (
                f"version {span.version} in step {step} with staleness bound {rules.staleness_max}"
            )
    return ""


def _in_vocabulary(tokens: NDArray[np.int32], vocab_size: int) -> bool:
    return bool(((tokens >= 0) & (tokens < vocab_size)).all())
