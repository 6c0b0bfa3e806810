"""Check a batch of the coordinator before it is trained.

The learner trusts nothing: `faults` checks every span of every trajectory (I1, I5), and a group
with a fault is refused, never trained. Tokens of an answer are written or given; the last one is
always written. Given tokens are context for the model but not part of the loss. With `masks`, I1 holds
for each token: a group is accepted if at least one of its tokens is fresh enough, and its stale tokens
are context too. Not here: how a batch is laid out (`packing`).
"""

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from heapq import merge
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from echo2d.client import Batch, Group, PeerFault, Span, Trajectory
from echo2d.core.protocol.experts import EXPERTS, ExpertShape

# A float32 softmax gives probability 0 to a token with a lower logprob, so no engine draws it.
_LOGPROB_MIN = -104.0
# Values of `finish` for answers that were cut off.
CUT_OFF = ("length", "context")
TRAINED_MAX = 1 << 14  # groups remembered: those of hundreds of steps

log = logging.getLogger("echo2d.learner")


@dataclass(frozen=True, slots=True)
class BatchRules:
    """What the session promises about every batch, and what the config says about answers."""

    staleness_max: int
    groups: int
    # Most episodes of one group. Twice as many may have been drawn; the others are left out.
    group_size: int
    vocab_size: int
    group_min: int  # least episodes of one group
    masks: bool = False  # whether over_stale is "mask"
    # Whether answers that were cut off are trained on; otherwise they only count in their group's mean.
    trains_cut: bool = True
    row_tokens_max: int = 0  # of a prompt with its answer; 0: no limit
    # Whether a group with a longer answer is refused; otherwise the answer's first tokens are trained.
    refuses_long: bool = False
    experts: ExpertShape | None = None  # what the experts of a token may be; None: a dense model

    def fresh(self, span: Span, step: int) -> bool:
        """Whether this step may train on the span's tokens."""
        return (step - 1) - span.version <= self.staleness_max

    def room(self, group: Group, tokens: int) -> int:
        """How many of an answer's tokens fit into a row after the group's prompt."""
        return (
            min(tokens, self.row_tokens_max - len(group.prompt)) if self.row_tokens_max else tokens
        )

    def experts_of(self, trajectory: Trajectory) -> NDArray[Any] | None:
        """The experts [n, l, c] that were told for its tokens; None: none that this model's routers can be given.

        The group is trained in any case: its tokens are right, and a worker must not stop a run by a column.
        """
        told = trajectory.columns.get(EXPERTS)
        if told is None:
            return None
        shape = self.experts
        fault = (
            "this model cannot replay them"
            if shape is None
            else shape.fault(told[trajectory.written])
        )
        if fault:
            _warn_of_experts(fault)
        return None if fault else told


class Trained:
    """The newest TRAINED_MAX groups that this learner has trained on, so that none is trained twice
    (I4).

    steps: train step by group id, from the checkpoint that the learner resumes from.
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
    """Return why groups may not be trained in this step, by group id; empty if all may.

    PeerFault: the batch is of another step or has another number of groups, which refusing groups
    cannot repair.
    """
    if batch.step != step or len(batch.groups) != rules.groups:
        wanted, received = (
            f"batch {step} of {rules.groups} groups",
            f"batch {batch.step} of {len(batch.groups)}",
        )
        raise PeerFault(f"asked for {wanted}; got {received}")
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
    """Train steps from the version of its oldest token to the weights that `step` starts from."""
    version_min: int = min(span.version for span in trajectory.spans)
    return (step - 1) - version_min


def staleness_histogram(batch: Batch) -> dict[int, int]:
    """The number of trajectories by staleness."""
    counts = Counter(
        staleness(trajectory, batch.step)
        for group in batch.groups
        for trajectory in group.trajectories
    )
    return dict(sorted(counts.items()))


def _group_fault(group: Group, step: int, rules: BatchRules) -> str:
    # Without branches each trajectory is an episode of its own, with the sample's number.
    firsts = [
        episode
        for episode, each in zip(group.episodes, group.trajectories, strict=True)
        if not each.branch
    ]
    size, count, samples = rules.group_size, len(firsts), sorted([*firsts, *group.left_out])
    if samples not in (list(range(size)), list(range(2 * size))):
        return f"expected samples 0 to {size - 1} or {2 * size - 1}; found {samples}"
    if not rules.group_min <= count <= size:
        return f"expected {rules.group_min} to {size} trajectories; found {count}"
    if fault := _branch_fault(group):
        return fault
    if len(group.prompt) == 0 or not _in_vocabulary(group.prompt, rules.vocab_size):
        return "its prompt is empty or has tokens outside the vocabulary"
    for index, trajectory in enumerate(group.trajectories):
        if fault := _trajectory_fault(trajectory, step, rules):
            return f"trajectory {index}: {fault}"
    longest = max(len(trajectory.tokens) for trajectory in group.trajectories)
    room = rules.room(group, longest)
    if room < (longest if rules.refuses_long else 1):
        return (
            f"its prompt of {len(group.prompt)} tokens with its longest answer of {longest} is beyond "
            f"row_tokens_max = {rules.row_tokens_max}"
        )
    if not any(
        rules.fresh(span, step) for trajectory in group.trajectories for span in trajectory.spans
    ):
        return f"it has no token with staleness up to {rules.staleness_max}"
    return ""


def _branch_fault(group: Group) -> str:
    found: dict[int, list[Trajectory]] = {}
    for episode, trajectory in zip(group.episodes, group.trajectories, strict=True):
        found.setdefault(episode, []).append(trajectory)
    if len({trajectory.sample for trajectory in group.trajectories}) < len(group.trajectories):
        return "two of its trajectories have the same sample number"
    for episode, members in found.items():
        branches = sorted(trajectory.branch for trajectory in members)
        if branches != list(range(len(members))):
            return f"episode {episode}: expected branches 0 to {len(members) - 1}; found {branches}"
        if len(rewards := {trajectory.reward for trajectory in members}) > 1:
            return (
                f"episode {episode}: expected one reward for all branches; found {sorted(rewards)}"
            )
    return ""


@lru_cache(16)
def _warn_of_experts(fault: str) -> None:
    """Log each fault once."""
    log.warning("trained without the experts that engines told: %s", fault)


def _trajectory_fault(trajectory: Trajectory, step: int, rules: BatchRules) -> str:
    length = len(trajectory.tokens)
    if length == 0 or not _in_vocabulary(trajectory.tokens, rules.vocab_size):
        return "it has no tokens, or tokens outside the vocabulary"
    if len(trajectory.logprobs) != length:
        return f"it has {len(trajectory.logprobs)} logprobs for {length} tokens"
    # Written so that NaN fails too. A probability's logarithm is at most 0, and 1e-4 allows for rounding.
    if not ((trajectory.logprobs >= _LOGPROB_MIN) & (trajectory.logprobs <= 1e-4)).all():
        return f"a logprob is not between {_LOGPROB_MIN:g} and 0"
    # Written so that NaN fails too.
    # The square of 1e15 is still finite in float32.
    if not abs(trajectory.reward) <= 1e15:
        return f"its reward is {trajectory.reward}"
    written = [(span.start, span.end) for span in trajectory.spans]
    # If one of the two lists is out of order, the merged list is out of order too.
    pieces = list(merge(written, trajectory.given))
    # The pieces cover the tokens if each begins where the one before ends, so that edges come in equal pairs.
    edges = [0, *chain(*pieces), length]
    if edges[::2] != edges[1::2] or any(start >= end for start, end in pieces):
        given = " and given tokens" if trajectory.given else ""
        return f"its spans{given} do not cover its {length} tokens"
    if trajectory.given and pieces[-1] not in written:
        return "it ends with given tokens; the last token must be written"
    if trajectory.logprobs[~trajectory.written].any():
        return "a given token has a logprob other than 0"
    for span in trajectory.spans:
        if span.version > step - 1 or not (rules.masks or rules.fresh(span, step)):
            return (
                f"version {span.version} in step {step} with staleness bound {rules.staleness_max}"
            )
    return ""


def _in_vocabulary(tokens: NDArray[np.int32], vocab_size: int) -> bool:
    return bool(((tokens >= 0) & (tokens < vocab_size)).all())
