"""The events, actions and records of groups and batches."""

from dataclasses import dataclass

from echo2d.core.base.ids import Digest, Epoch, GroupId, LeaseId, PeerId, Version
from echo2d.core.cluster.events import Note, Persist, Send, StopRun
from echo2d.core.protocol.control_messages import Finish, HeldLease, VersionKey
from echo2d.core.protocol.trajectory import (
    NO_SOURCE,
    NOTHING,
    Partial,
    RewardPart,
    Source,
    StoredGroup,
    TrajectoryRecord,
)

# --- events


@dataclass(frozen=True, slots=True)
class PromptDrawn:
    """Prompt number `cursor` of the task (answers DrawPrompt)."""

    cursor: int
    tokens: bytes
    source: Source = NO_SOURCE


@dataclass(frozen=True, slots=True)
class PromptFailed:
    """Prompt number `cursor` of the task cannot be made (answers DrawPrompt)."""

    cursor: int
    reason: str


@dataclass(frozen=True, slots=True)
class SampleScored:
    """The reward of one trajectory (answers ScoreSample); None: it failed for `reason`.

    A reward with a reason is 0 because nobody could say what the answer is worth.
    """

    group: GroupId
    sample: int
    reward: float | None
    reason: str
    parts: tuple[RewardPart, ...] = ()


# --- records


@dataclass(frozen=True, slots=True)
class PromptTaken:
    """The prompt at this cursor became this group; the next prompt is that of cursor + 1."""

    group: GroupId
    cursor: int
    prompt: bytes
    source: Source = NO_SOURCE


@dataclass(frozen=True, slots=True)
class LeaseGiven:
    """An attempt that was granted.

    served: the version that its worker served then. base: the tokens that its only sample had
    before, mostly NOTHING.
    """

    group: GroupId
    lease: LeaseId
    attempt: int
    worker: PeerId
    samples: tuple[int, ...]
    served: VersionKey
    base: Partial = NOTHING

    @property
    def key(self) -> HeldLease:
        return HeldLease(self.lease, self.attempt)

    @property
    def oldest(self) -> Version:
        """No token of its trajectories is of an older version than this."""
        begun = self.base.version_min
        return self.served.version if begun is None else min(begun, self.served.version)


@dataclass(frozen=True, slots=True)
class SampleKept:
    """An accepted result, not yet scored (its reward is NaN until SampleRewarded).

    trajectory: whole, with the tokens that the attempt continued. fingerprint: of the worker's
    message, by which repeats are recognised.
    """

    group: GroupId
    lease: LeaseId
    attempt: int
    trajectory: TrajectoryRecord
    fingerprint: bytes = b""


@dataclass(frozen=True, slots=True)
class SampleRewarded:
    group: GroupId
    sample: int
    reward: float
    parts: tuple[RewardPart, ...] = ()


@dataclass(frozen=True, slots=True)
class SampleReturned:
    """A kept sample is forgotten, because its worker may have lied: another one writes it."""

    group: GroupId
    sample: int


@dataclass(frozen=True, slots=True)
class SampleLeftOut:
    """The reward of a kept sample failed, so its group goes on without that sample."""

    group: GroupId
    sample: int


@dataclass(frozen=True, slots=True)
class GroupDropped:
    """The group was dropped for good with everything it had: too old, filtered, failed, refused."""

    group: GroupId
    reason: str


@dataclass(frozen=True, slots=True)
class BatchFrozen:
    """Batch `step` is these groups in this order.

    After a refusal, it replaces an earlier record.
    """

    step: int
    digest: Digest
    groups: tuple[GroupId, ...]
    refusals: int


@dataclass(frozen=True, slots=True)
class BatchCommitted:
    """The learner has trained on batch `step`, which took `t_train_s` seconds."""

    step: int
    epoch: Epoch
    digest: Digest
    t_train_s: float


RolloutRecord = (
    PromptTaken
    | LeaseGiven
    | SampleKept
    | SampleRewarded
    | SampleReturned
    | SampleLeftOut
    | GroupDropped
    | BatchFrozen
    | BatchCommitted
)


@dataclass(frozen=True, slots=True)
class AcceptedResult:
    """A result that was accepted. Its repeats have the same fingerprint."""

    key: HeldLease
    sample: int
    fingerprint: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveredRollouts:
    """The groups and batches that the ledger gives back after a restart.

    given, answered: those of stored groups, in the order in which they were granted and accepted.
    """

    epoch: Epoch
    resume_step: int
    next_cursor: int
    next_group: GroupId
    groups: tuple[StoredGroup, ...]  # by group id
    frozen: tuple[BatchFrozen, ...]  # by step; only steps > checkpoint
    committed: tuple[BatchCommitted, ...]  # by step; only steps > checkpoint, newest epoch wins
    checkpoint: int
    given: tuple[LeaseGiven, ...] = ()
    answered: tuple[AcceptedResult, ...] = ()


# --- actions


@dataclass(frozen=True, slots=True)
class DrawPrompt:
    """Draw prompt number `cursor` of the task."""

    cursor: int


@dataclass(frozen=True, slots=True)
class ScoreSample:
    """Score the output of one sample of the group whose prompt is number `cursor`."""

    group: GroupId
    sample: int
    cursor: int
    tokens: bytes
    finish: Finish


RolloutAction = Persist[RolloutRecord] | Send | DrawPrompt | ScoreSample | StopRun | Note
