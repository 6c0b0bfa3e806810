"""The data of a train step as a trainer sees them, decoded from the bytes of a batch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

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


@dataclass(frozen=True, slots=True)
class Span:
    """This version wrote output tokens [start, end), at worker `author` (its peer id).

    digest: of its snapshot, hex.
    """

    start: int
    end: int
    version: int
    digest: str
    author: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One answer, or one branch of an episode. sample: its number in its group; that of branch b is
    b * 65536 above that of its episode.

    tokens: int32 [n]. logprobs: float32 [n], natural log, of the distribution that they were
    sampled from. worker: the peer id of the worker that finished it. finish: "stop" at a stop token,
    "length" at the most tokens that it may have, "context" where the model's context was full.
    reward_parts: named numbers that the reward was made of. given: [start, end) of output tokens that
    no version wrote; spans cover all others, and their logprobs are 0. turns: how often the policy
    wrote. task, row: where its prompt comes from. episode, branch: as in `Group.episodes`. columns: by
    name, numbers of each token [n, ...], read-only, that every engine which wrote for it has written, such
    as experts; of given tokens they are 0. attachments: what belongs to its prompt, such as pictures; see
    `Coordinator.attachment`.
    """

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    spans: tuple[Span, ...]
    reward: float
    worker: str
    finish: str = "stop"
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    given: tuple[tuple[int, int], ...] = ()
    turns: int = 1
    task: str = ""
    row: str = ""
    episode: int = 0
    branch: int = 0
    sample: int = 0
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
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
    """The trajectories of one prompt. prompt: int32 [p].

    left_out: the samples that it lacks, because their reward could not be computed, or because others
    contrast more (`task.sampler = "pairs"`). sampling: how all its tokens were drawn. tags: facts
    about the prompt by which rewards are compared.
    """

    group_id: int
    prompt: NDArray[np.int32]
    trajectories: tuple[Trajectory, ...]
    left_out: tuple[int, ...] = ()
    sampling: Sampling = WHOLE
    tags: Mapping[str, str] = field(default_factory=dict)

    @property
    def episodes(self) -> list[int]:
        """The number of each trajectory's episode. Trajectories of one episode are its branches 0, 1,
        ... and share its reward. In a group without branches each trajectory is an episode of its own.
        """
        if any(each.branch for each in self.trajectories):
            return [each.episode for each in self.trajectories]
        return [each.sample for each in self.trajectories]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The data of one train step. digest: of the batch's bytes as they were sent, hex.

    staleness_max: S as the coordinator has it now, which the operator may change while the run goes
    on; None: it does not say.
    """

    step: int
    epoch: int
    digest: str
    groups: tuple[Group, ...]
    staleness_max: int | None = None


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
    """The trajectories of one sample: its branches, mostly one. PeerFault: its columns do not fit it."""
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
        # Each given range is followed by a turn.
        turns = len(given) + (not given or given[0][0] > 0)
        # A branch's trajectory has a number of its own: above every sample's, which are fewer than
        # this.
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
                # All but the last branch end with a turn whose answer no later call continued.
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
