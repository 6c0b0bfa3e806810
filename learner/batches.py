"""From a batch of the coordinator to what the loss needs; and the check that lets it come so far.

The learner believes nothing: `faults` checks every span of every trajectory (I1, I5), and a group with a fault is
refused, never trained. With `masks`, I1 holds per token: a group may come if its newest token is fresh enough, and its
tokens that are not are read by the model and left out of the loss.

Suffixes of names: b = rows (trajectories) of a micro-batch, t = positions, n = its answer tokens, in row-major order.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from echo2d.client import Batch, Group, PeerFault, Span, Trajectory
from learner.grpo import group_advantages

LOGPROB_MAX = 1e-4  # log of a probability, and a little rounding
PAD = 0  # any id will do: attention is causal, so what stands right of a row is never seen by it


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


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows of one forward pass, padded on the right. answer_bt marks the tokens that count in the loss, the n."""

    tokens_bt: NDArray[np.int64]
    answer_bt: NDArray[np.bool_]
    rollout_logprobs_n: NDArray[np.float32]
    advantages_n: NDArray[np.float32]


def faults(batch: Batch, step: int, rules: BatchRules) -> dict[int, str]:
    """Why groups may not be trained in this step, by group id; empty where all may.

    PeerFault: another step, another number of groups, or a group twice. No refusal mends that.
    """
    ids = [group.group_id for group in batch.groups]
    if batch.step != step or len(ids) != rules.groups or len(set(ids)) != len(ids):
        raise PeerFault(
            f"asked for batch {step} of {rules.groups} groups; got batch {batch.step} of {len(set(ids))} different ones"
        )
    found = ((group.group_id, _group_fault(group, step, rules)) for group in batch.groups)
    return {group_id: fault for group_id, fault in found if fault}


def staleness(trajectory: Trajectory, step: int) -> int:
    """Train steps between its oldest token's version and the weights that `step` trains."""
    version_min: int = min(span.version for span in trajectory.spans)
    return (step - 1) - version_min


def staleness_histogram(batch: Batch) -> dict[int, int]:
    """How many trajectories have which staleness."""
    counts = Counter(staleness(trajectory, batch.step) for group in batch.groups for trajectory in group.trajectories)
    return dict(sorted(counts.items()))


def micro_batches(batch: Batch, tokens_max: int, rules: BatchRules) -> list[MicroBatch]:
    """The rows with tokens that count, longest first, in micro-batches of at most `tokens_max` (or one row)."""
    rows = sorted(_rows(batch, rules), key=lambda row: len(row.tokens), reverse=True)
    micro: list[MicroBatch] = []
    while rows:
        count = max(1, tokens_max // len(rows[0].tokens))
        micro.append(_collate(rows[:count]))
        rows = rows[count:]
    return micro


@dataclass(frozen=True, slots=True)
class _Row:
    tokens: NDArray[np.int32]  # prompt and answer
    counts: NDArray[np.bool_]  # which of them are in the loss
    logprobs: NDArray[np.float32]  # of those
    advantage: np.float32


def _rows(batch: Batch, rules: BatchRules) -> Iterator[_Row]:
    for group in batch.groups:
        advantages = group_advantages(np.array([t.reward for t in group.trajectories], dtype=np.float32))
        for trajectory, advantage in zip(group.trajectories, advantages, strict=True):
            fresh = np.zeros(len(trajectory.tokens), dtype=np.bool_)
            for span in trajectory.spans:
                fresh[span.start : span.end] = rules.fresh(span, batch.step)
            if fresh.any():
                tokens = np.concatenate([group.prompt, trajectory.tokens])
                counts = np.concatenate([np.zeros(len(group.prompt), dtype=np.bool_), fresh])
                yield _Row(tokens, counts, trajectory.logprobs[fresh], advantage)


def _collate(rows: list[_Row]) -> MicroBatch:
    shape = (len(rows), len(rows[0].tokens))
    tokens_bt = np.full(shape, PAD, dtype=np.int64)
    answer_bt = np.zeros(shape, dtype=np.bool_)
    for index, row in enumerate(rows):
        tokens_bt[index, : len(row.tokens)] = row.tokens
        answer_bt[index, : len(row.tokens)] = row.counts
    return MicroBatch(
        tokens_bt,
        answer_bt,
        np.concatenate([row.logprobs for row in rows]),
        np.repeat([row.advantage for row in rows], [len(row.logprobs) for row in rows]).astype(np.float32),
    )


def _group_fault(group: Group, step: int, rules: BatchRules) -> str:
    if len(group.trajectories) != rules.group_size:
        return f"{len(group.trajectories)} trajectories of {rules.group_size}"
    if len(group.prompt) == 0 or not _in_vocabulary(group.prompt, rules.vocab_size):
        return "a prompt that is empty or leaves the vocabulary"
    for index, trajectory in enumerate(group.trajectories):
        if fault := _trajectory_fault(trajectory, step, rules):
            return f"trajectory {index}: {fault}"
    if not any(rules.fresh(span, step) for trajectory in group.trajectories for span in trajectory.spans):
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
    if not np.isfinite(trajectory.reward):
        return f"reward {trajectory.reward}"
    edges = [0, *(edge for span in trajectory.spans for edge in (span.start, span.end)), length]
    if edges[::2] != edges[1::2] or any(span.start >= span.end for span in trajectory.spans):
        return f"spans that do not cover its {length} tokens"
    for span in trajectory.spans:
        if span.version > step - 1 or not (rules.masks or rules.fresh(span, step)):
            return f"version {span.version} in step {step} with staleness bound {rules.staleness_max}"
    return ""


def _in_vocabulary(tokens: NDArray[np.int32], vocab_size: int) -> bool:
    return bool(((tokens >= 0) & (tokens < vocab_size)).all())
