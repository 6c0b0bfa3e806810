"""The events, actions and records of groups and batches."""

from dataclasses import dataclass

from echo2d.core.base.ids import Digest, Epoch, GroupId, LeaseId, PeerId, Version
from echo2d.core.cluster.events import Note, Persist, Send, StopRun
from echo2d.core.protocol.control_messages import Finish, HeldLease, VersionKey
from echo2d.core.protocol.sampling import WHOLE, Sampling
from echo2d.core.protocol.trajectory import (
    NO_SOURCE,
    NOTHING,
    Partial,
    PromptTag,
    RewardPart,
    Source,
    StoredGroup,
    TrajectoryRecord,
)

# --- events


@dataclass(frozen=True, slots=True)
class PromptDrawn:
    """Prompt number `cursor` of the task `source.task` (answers DrawPrompt).

    contents: of the source's attachments. The shell keeps them, and the core never sees them.
    """

    cursor: int
    tokens: bytes
    source: Source = NO_SOURCE
    tags: tuple[PromptTag, ...] = ()
    contents: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptFailed:
    """Prompt number `cursor` of this task cannot be made (answers DrawPrompt)."""

    cursor: int
    reason: str
    task: str = ""


@dataclass(frozen=True, slots=True)
class PromptsEnded:
    """This task has no prompt number `cursor`, nor any after it (answers DrawPrompt)."""

    cursor: int
    task: str = ""


@dataclass(frozen=True, slots=True)
class SampleScored:
    """The reward of one trajectory (answers ScoreSample); None: it failed for `reason`.

    A reward with a reason is 0 because nobody could say what the answer is worth, or because the run
    gives 0 where the task's code failed. failed: whether it did.
    """

    group: GroupId
    sample: int
    reward: float | None
    reason: str
    parts: tuple[RewardPart, ...] = ()
    failed: bool = False


@dataclass(frozen=True, slots=True)
class RewardsProbed:
    """What the first expected answers of a task are worth (answers ProbeRewards).

    failed, succeeded: of how many prompts the reward failed, or came. reason: of the last failure.
    """

    task: str
    failed: int
    succeeded: int
    reason: str


@dataclass(frozen=True, slots=True)
class EnvironmentStepped:
    """The environment's answer to a turn: the next turn's tokens, int32. The episode goes on.

    begun, turn: as in the `StepEnvironment` that this answers. state: what the environment needs to go
    on in another process; None: it cannot. anew: they follow the prompt, not the turns before: they begin a branch.
    """

    group: GroupId
    sample: int
    begun: int
    turn: int
    tokens: bytes
    state: bytes | None = None
    anew: bool = False


@dataclass(frozen=True, slots=True)
class EpisodeEnded:
    """The environment ended an episode, or failed. reward, reason, parts, failed: as in SampleScored.

    begun, turn: as in the `StepEnvironment` that this answers. again: the agent that played it is gone:
    the sample begins anew, as long as that has not happened too often.
    """

    group: GroupId
    sample: int
    begun: int
    turn: int
    reward: float | None
    reason: str = ""
    parts: tuple[RewardPart, ...] = ()
    again: bool = False
    failed: bool = False


# --- records


@dataclass(frozen=True, slots=True)
class TaskBegun:
    """The run has this task from now on.

    data, texts: digests of the task's data, and of the files that turn its text into tokens; empty
    where there are none.
    """

    task: str
    data: bytes
    texts: bytes


@dataclass(frozen=True, slots=True)
class PromptTaken:
    """The prompt at this cursor of the task `source.task` became this group.

    The task's next prompt is that of cursor + 1. sampling: as its answers are drawn.
    """

    group: GroupId
    cursor: int
    prompt: bytes
    source: Source = NO_SOURCE
    sampling: Sampling = WHOLE
    tags: tuple[PromptTag, ...] = ()


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
class TurnKept:
    """An accepted result that ends a turn of an episode; the environment is to answer it.

    turn: from 1 on; 0: an episode of an agent outside has its first call, and nothing is written yet.
    partial: the whole episode so far. fingerprint: as in SampleKept.
    """

    group: GroupId
    sample: int
    turn: int
    lease: LeaseId
    attempt: int
    partial: Partial
    finish: Finish
    fingerprint: bytes = b""

    @property
    def worker(self) -> PeerId:
        """The worker that ended this turn. Empty: it is turn 0."""
        return self.partial.spans[-1].author if self.partial.spans else PeerId("")


def unwritten(group: GroupId, sample: int) -> TurnKept:
    """Turn 0 of an episode that an agent outside begins."""
    return TurnKept(group, sample, 0, LeaseId(0), 0, NOTHING, "stop")


@dataclass(frozen=True, slots=True)
class TurnAnswered:
    """The environment has answered this turn, and is never asked for it again.

    tokens, state, anew: as in EnvironmentStepped.
    """

    group: GroupId
    sample: int
    turn: int
    tokens: bytes
    state: bytes | None = None
    anew: bool = False


@dataclass(frozen=True, slots=True)
class EpisodeForgotten:
    """The turns of this sample do not count any more: it begins anew."""

    group: GroupId
    sample: int


@dataclass(frozen=True, slots=True)
class RecoveredTurn:
    """The last turn of an episode that has not ended.

    answered: None: the environment did not, or it is not known. state_before: that of the turn before.
    """

    kept: TurnKept
    answered: TurnAnswered | None = None
    state_before: bytes | None = None


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
class RowJudged:
    """What is known about a row from its groups.

    groups: how many were judged; 0: the row is forgotten. equal: of the last ones in a row, those whose
    rewards were all the same. volatility: standard deviation of a group's rewards, newer groups
    weighing more. version: the newest one that wrote for the last of them.
    """

    source: Source
    groups: int
    equal: int
    volatility: float
    version: Version


@dataclass(frozen=True, slots=True)
class GroupDropped:
    """The group was dropped for good with everything it had: too old, filtered, failed, refused.

    again: its prompt is not to blame, and will become another group.
    """

    group: GroupId
    reason: str
    again: bool = False


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


@dataclass(frozen=True, slots=True)
class WorkerDelivery:
    """What a worker may hold, and why (`deliveries`): tokens/s that it delivers, and of one sample."""

    worker: PeerId
    allowed: int
    tokens_per_s: float
    speed: float


@dataclass(frozen=True, slots=True)
class DeliveriesMeasured:
    """They replace what was known of these workers."""

    workers: tuple[WorkerDelivery, ...]


RolloutRecord = (
    TaskBegun
    | DeliveriesMeasured
    | PromptTaken
    | LeaseGiven
    | SampleKept
    | TurnKept
    | TurnAnswered
    | EpisodeForgotten
    | SampleRewarded
    | SampleReturned
    | SampleLeftOut
    | RowJudged
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


@dataclass(frozen=True, slots=True)
class TaskProgress:
    """A task that the run has had: the number of its next prompt, and the digests of `TaskBegun`."""

    task: str
    next_cursor: int
    data: bytes
    texts: bytes


@dataclass(frozen=True, slots=True)
class PromptGivenBack:
    """The prompt at this cursor has no group: its last one was dropped for no fault of the prompt."""

    task: str
    cursor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveredRollouts:
    """The groups and batches that the ledger gives back after a restart.

    given, answered: those of stored groups, in the order in which they were granted and accepted.
    turns: the last one of each episode that has not ended.
    """

    epoch: Epoch
    resume_step: int
    next_group: GroupId
    groups: tuple[StoredGroup, ...]  # by group id
    frozen: tuple[BatchFrozen, ...]  # by step; only steps > checkpoint
    committed: tuple[BatchCommitted, ...]  # by step; only steps > checkpoint, newest epoch wins
    checkpoint: int
    given: tuple[LeaseGiven, ...] = ()
    turns: tuple[RecoveredTurn, ...] = ()
    answered: tuple[AcceptedResult, ...] = ()
    tasks: tuple[TaskProgress, ...] = ()
    rows: tuple[RowJudged, ...] = ()
    given_back: tuple[PromptGivenBack, ...] = ()
    deliveries: tuple[WorkerDelivery, ...] = ()

    def next_cursor(self, task: str) -> int:
        """The number of this task's next prompt."""
        return next((each.next_cursor for each in self.tasks if each.task == task), 0)


# --- actions


@dataclass(frozen=True, slots=True)
class DrawPrompt:
    """Draw prompt number `cursor` of this task."""

    cursor: int
    task: str = ""


@dataclass(frozen=True, slots=True)
class ScoreSample:
    """Score the output of one sample of the group whose prompt is number `cursor` of the task."""

    group: GroupId
    sample: int
    cursor: int
    tokens: bytes
    finish: Finish
    task: str = ""


@dataclass(frozen=True, slots=True)
class ProbeRewards:
    """Score answers that no worker wrote, to the task's first prompts: the expected ones, or empty ones."""

    task: str
    prompts: int


@dataclass(frozen=True, slots=True)
class StepEnvironment:
    """Tell the environment how a turn of an episode ended.

    cursor, task: of the group's prompt. begun: how often the sample was begun before. rng_seed: of
    the episode. output: all that follows the prompt; the last turn is the tokens from its `turn_start` on.
    state: as the environment left it after the turn before; None: it has none, or this is the first turn.
    again: the environment may have been told of this turn before. turn: 0: an agent outside may begin this episode.
    """

    group: GroupId
    sample: int
    begun: int
    turn: int
    cursor: int
    rng_seed: int
    prompt: bytes
    output: Partial
    finish: Finish
    state: bytes | None = None
    task: str = ""
    again: bool = False


@dataclass(frozen=True, slots=True)
class ForgetEpisode:
    """The environment need not keep this sample's episode any longer.

    ended: the end that its agent outside has told is durable. False: nobody wants the episode any more.
    """

    group: GroupId
    sample: int
    task: str = ""
    ended: bool = False


RolloutAction = (
    Persist[RolloutRecord]
    | Send
    | DrawPrompt
    | ScoreSample
    | ProbeRewards
    | StepEnvironment
    | ForgetEpisode
    | StopRun
    | Note
)
