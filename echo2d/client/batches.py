"""The data of a train step as a trainer sees them, decoded from the bytes of a batch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from echo2d.core.protocol.columns import columns_fault
from echo2d.core.protocol.sampling import WHOLE, Sampling
from echo2d.core.protocol.trajectory import (
    Attachment,
    TrajectoryRecord,
    batch_digest,
    unpack_batch,
    unpack_logprobs,
    unpack_tokens,
)
from echo2d.errors import IntegrityFault, PeerFault

Own = TypeVar("Own", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Span:
    """A version wrote output tokens [start, end)."""

    start: int
    end: int
    version: int
    digest: str  # digest of the version's snapshot, hex
    author: str = ""  # peer id of the worker


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One answer, or one branch of an episode."""

    tokens: NDArray[np.int32]  # [n]
    # [n], natural log, of the distribution that the tokens were sampled from; 0 for given tokens.
    logprobs: NDArray[np.float32]
    spans: tuple[Span, ...]  # cover all tokens except the given ones
    reward: float
    worker: str  # peer id of the worker that finished it
    # "stop": at a stop token; "length": at the token limit; "context": the model's context was full.
    finish: str = "stop"
    # Components of the reward, by name.
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    given: tuple[tuple[int, int], ...] = ()  # [start, end) of output tokens that no version wrote
    turns: int = 1  # how often the policy wrote
    # The task and the row that its prompt is from.
    task: str = ""
    row: str = ""
    # See `Group.episodes`.
    episode: int = 0
    branch: int = 0
    # Its number in its group; branch b has b * 65,536 plus the number of its episode.
    sample: int = 0
    # Numbers for each token [n, ...], such as experts, by the column's name; read-only; 0 for given tokens. A
    # column is left out if one of the engines that wrote these tokens did not write it.
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    # What belongs to its prompt, such as pictures; see `Coordinator.attachment`.
    attachments: tuple[Attachment, ...] = ()

    @property
    def written(self) -> NDArray[np.bool_]:
        """Which of the tokens a version wrote [n]; only these count in the loss and in means over
        tokens.
        """
        mask = np.ones(len(self.tokens), dtype=np.bool_)
        for start, end in self.given:
            mask[start:end] = False
        return mask


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The trajectories of one prompt."""

    group_id: int
    prompt: NDArray[np.int32]  # [p]
    trajectories: tuple[Trajectory, ...]
    # The samples that it lacks, because their reward could not be computed, or because others
    # contrast more (`task.sampler = "pairs"`).
    left_out: tuple[int, ...] = ()
    sampling: Sampling = WHOLE  # how all its tokens were drawn
    # Facts about the prompt, to compare rewards by.
    tags: Mapping[str, str] = field(default_factory=dict)

    @property
    def episodes(self) -> list[int]:
        """The number of each trajectory's episode. Trajectories of one episode are its branches 0, 1,
        ... and share its reward. In a group without branches each trajectory is a separate episode.
        """
        if any(each.branch for each in self.trajectories):
            return [each.episode for each in self.trajectories]
        return [each.sample for each in self.trajectories]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The data of one train step."""

    step: int
    epoch: int
    digest: str  # digest of the batch's bytes as they were sent, hex
    groups: tuple[Group, ...]
    # S as the coordinator has it now: the operator may change it during the run. None: not known.
    staleness_max: int | None = None


def whole_batch(advantages: Own) -> Own:
    """Mark a function of learner.advantages: it gets a list with the rewards [g] of each group of a batch, and returns
    a list of advantages [g]. Without the mark it is called for each group alone.
    """
    advantages.whole_batch = True  # type: ignore[attr-defined]
    return advantages


def read_batch(epoch: int, digest: str, body: bytes) -> Batch:
    """Decode a batch. IntegrityFault: its bytes do not have this digest (hex)."""
    if batch_digest(body).hex() != digest:
        raise IntegrityFault("a batch's bytes do not have the digest that was sent with them")
    found = unpack_batch(body)
    groups = tuple(
        Group(
            group.group,
            unpack_tokens(group.prompt),
            tuple(branch for kept in group.trajectories for branch in _branches(kept)),
            group.left_out,
            group.sampling,
            {tag.name: tag.value for tag in group.tags},
        )
        for group in found.groups
    )
    return Batch(found.step, epoch, digest, groups)


def _branches(kept: TrajectoryRecord) -> list[Trajectory]:
    """The trajectories of one sample, one for each branch. PeerFault: its columns do not fit it."""
    if fault := columns_fault(kept.columns, kept.length):
        raise PeerFault(fault)
    columns = {column.name: column.array for column in kept.columns}
    tokens, logprobs = unpack_tokens(kept.tokens), unpack_logprobs(kept.logprobs)
    edges = (0, *kept.branches, kept.length)
    found = []
    for branch, (start, end) in enumerate(pairwise(edges)):
        given = tuple(
            (g.start - start, g.end - start) for g in kept.given if start <= g.start < end
        )
        # A turn follows each given range.
        turns = len(given) + (not given or given[0][0] > 0)
        # The number of a branch's trajectory is larger than that of any sample, because a group has fewer
        # samples than this.
        found.append(
            Trajectory(
                tokens[start:end],
                logprobs[start:end],
                tuple(
                    Span(s.start - start, s.end - start, s.version, s.digest.hex(), s.author)
                    for s in kept.spans
                    if start <= s.start < end
                ),
                kept.reward,
                kept.worker,
                # Every branch except the last ends with an answer that no later call continued.
                kept.finish if end == kept.length else "stop",
                {part.name: part.value for part in kept.reward_parts},
                given,
                turns if kept.branches else kept.turns,
                kept.source.task,
                kept.source.row,
                kept.sample,
                branch,
                kept.sample + branch * (1 << 16),
                {name: array[start:end] for name, array in columns.items()},
                kept.source.attachments,
            )
        )
    return found
