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
    """Prompt number `cursor` of the task `source.task` (answers DrawPrompt)."""

    cursor: int
    tokens: bytes
    source: Source = NO_SOURCE
    tags: tuple[PromptTag, ...] = ()
    # The contents of the source's attachments. The shell keeps them, and the core never sees them.
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

    A reward with a reason is 0 because the answer could not be scored, or because the run gives 0 when
    the task's code fails.
    """

    group: GroupId
    sample: int
    reward: float | None
    reason: str
    parts: tuple[RewardPart, ...] = ()
    failed: bool = False  # whether the task's code failed


@dataclass(frozen=True, slots=True)
class RewardsProbed:
    """The rewards of the first expected answers of a task were computed (answers ProbeRewards)."""

    task: str
    failed: int  # for how many prompts the reward failed
    succeeded: int  # for how many prompts it did not
    reason: str  # of the last failure


@dataclass(frozen=True, slots=True)
class EnvironmentStepped:
    """The environment's answer to a turn: tokens (int32) before the next turn. The episode continues."""

    group: GroupId
    sample: int
    # As in the `StepEnvironment` that this answers.
    begun: int
    turn: int
    tokens: bytes
    # What the environment needs to continue in another process; None: it cannot.
    state: bytes | None = None
    # Whether the tokens follow the prompt instead of the turns before, and so begin a branch.
    anew: bool = False


@dataclass(frozen=True, slots=True)
class EpisodeEnded:
    """The environment ended an episode, or failed."""

    group: GroupId
    sample: int
    # As in the `StepEnvironment` that this answers.
    begun: int
    turn: int
    # As in SampleScored.
    reward: float | None
    reason: str = ""
    parts: tuple[RewardPart, ...] = ()
    # Whether the agent that played it is gone: then the sample starts over, unless that has happened too
    # often.
    again: bool = False
    failed: bool = False


# --- records


@dataclass(frozen=True, slots=True)
class TaskBegun:
    """The run has this task from now on."""

    task: str
    # The digest of the task's data; empty: there are none.
    data: bytes
    # The digest of the files that turn its text into tokens; empty: there are none.
    texts: bytes


@dataclass(frozen=True, slots=True)
class PromptTaken:
    """The prompt at this cursor of the task `source.task` became this group.

    The task's next prompt is that of cursor + 1.
    """

    group: GroupId
    cursor: int
    prompt: bytes
    source: Source = NO_SOURCE
    sampling: Sampling = WHOLE  # how its answers are drawn
    tags: tuple[PromptTag, ...] = ()


@dataclass(frozen=True, slots=True)
class LeaseGiven:
    """An attempt of a lease was granted."""

    group: GroupId
    lease: LeaseId
    attempt: int
    worker: PeerId
    samples: tuple[int, ...]
    served: VersionKey  # the version that the worker served then
    # The tokens that its only sample had before; mostly NOTHING.
    base: Partial = NOTHING

    @property
    def key(self) -> HeldLease:
        return HeldLease(self.lease, self.attempt)

    @property
    def oldest(self) -> Version:
        """The oldest version that may have written a token of its trajectories."""
        begun = self.base.version_min
        return self.served.version if begun is None else min(begun, self.served.version)


@dataclass(frozen=True, slots=True)
class SampleKept:
    """An accepted result, not yet scored (its reward is NaN until SampleRewarded)."""

    group: GroupId
    lease: LeaseId
    attempt: int
    # The whole trajectory, with the tokens from which the attempt continued.
    trajectory: TrajectoryRecord
    # The fingerprint of the worker's message, by which repeats are recognised.
    fingerprint: bytes = b""


@dataclass(frozen=True, slots=True)
class TurnKept:
    """An accepted result that ends a turn of an episode; the environment must answer it."""

    group: GroupId
    sample: int
    # Counts from 1; 0: an external agent has made the first call of its episode, and no turn is written yet.
    turn: int
    lease: LeaseId
    attempt: int
    partial: Partial  # the whole episode so far
    finish: Finish
    fingerprint: bytes = b""  # as in SampleKept

    @property
    def worker(self) -> PeerId:
        """The worker that ended this turn; empty: it is turn 0."""
        return self.partial.spans[-1].author if self.partial.spans else PeerId("")


def unwritten(group: GroupId, sample: int) -> TurnKept:
    """Turn 0 of an episode that an external agent begins."""
    return TurnKept(group, sample, 0, LeaseId(0), 0, NOTHING, "stop")


@dataclass(frozen=True, slots=True)
class TurnAnswered:
    """The environment has answered this turn, and is never asked for it again."""

    group: GroupId
    sample: int
    turn: int
    # As in EnvironmentStepped.
    tokens: bytes
    state: bytes | None = None
    anew: bool = False


@dataclass(frozen=True, slots=True)
class EpisodeForgotten:
    """The turns of this sample no longer count: it starts over."""

    group: GroupId
    sample: int


@dataclass(frozen=True, slots=True)
class RecoveredTurn:
    """The last turn of an episode that has not ended."""

    kept: TurnKept
    # The environment's answer; None: there is none, or it is not known.
    answered: TurnAnswered | None = None
    state_before: bytes | None = None  # the environment's state after the turn before


@dataclass(frozen=True, slots=True)
class SampleRewarded:
    group: GroupId
    sample: int
    reward: float
    parts: tuple[RewardPart, ...] = ()


@dataclass(frozen=True, slots=True)
class SampleReturned:
    """A kept sample is forgotten because its worker may have lied: another worker writes it."""

    group: GroupId
    sample: int


@dataclass(frozen=True, slots=True)
class SampleLeftOut:
    """The reward of a kept sample failed, so its group continues without that sample."""

    group: GroupId
    sample: int


@dataclass(frozen=True, slots=True)
class RowJudged:
    """What is known about a row from its groups."""

    source: Source
    # How many groups were judged; 0: the row is forgotten.
    groups: int
    # How many groups in a row, up to the last one, had only equal rewards.
    equal: int
    # The standard deviation of a group's rewards; newer groups weigh more.
    volatility: float
    version: Version  # the newest version that wrote for the last group


@dataclass(frozen=True, slots=True)
class GroupDropped:
    """The group was dropped for good, with all its samples: too old, filtered, failed, refused."""

    group: GroupId
    reason: str
    # True: the prompt was not at fault, so it is used again in a new group.
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
    """How many samples a worker may hold, and why (`deliveries`)."""

    worker: PeerId
    allowed: int
    tokens_per_s: float  # that the worker delivers
    speed: float  # tokens/s of one sample


@dataclass(frozen=True, slots=True)
class DeliveriesMeasured:
    """New measurements, which replace those that were known of these workers."""

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
    """An accepted result. Its repeats have the same fingerprint."""

    key: HeldLease
    sample: int
    fingerprint: bytes


@dataclass(frozen=True, slots=True)
class TaskProgress:
    """A task of the run so far: the number of its next prompt, and the digests of `TaskBegun`."""

    task: str
    next_cursor: int
    data: bytes
    texts: bytes


@dataclass(frozen=True, slots=True)
class PromptGivenBack:
    """The prompt at this cursor has no group: its last group was dropped without the prompt's fault."""

    task: str
    cursor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveredRollouts:
    """The groups and batches that the ledger gives back after a restart."""

    epoch: Epoch
    resume_step: int
    next_group: GroupId
    groups: tuple[StoredGroup, ...]  # by group id
    frozen: tuple[BatchFrozen, ...]  # by step; only steps > checkpoint
    committed: tuple[BatchCommitted, ...]  # by step; only steps > checkpoint, newest epoch wins
    checkpoint: int
    given: tuple[LeaseGiven, ...] = ()  # the leases of stored groups, in the order of their grants
    # The last turn of each episode that has not ended.
    turns: tuple[RecoveredTurn, ...] = ()
    # The accepted results of stored groups, in the order of their acceptance.
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
    """Score answers to the task's first prompts that no worker wrote: the expected ones, or empty ones."""

    task: str
    prompts: int


@dataclass(frozen=True, slots=True)
class StepEnvironment:
    """Tell the environment how a turn of an episode ended."""

    group: GroupId
    sample: int
    begun: int  # how many times the sample was begun before
    turn: int  # 0: an external agent may begin this episode
    cursor: int  # of the group's prompt
    rng_seed: int  # of the episode
    prompt: bytes
    # All tokens after the prompt; the last turn begins at their `turn_start`.
    output: Partial
    finish: Finish
    # The environment's state after the turn before; None: it has none, or this is the first turn.
    state: bytes | None = None
    task: str = ""
    # Whether the environment may know this turn already.
    again: bool = False


@dataclass(frozen=True, slots=True)
class ForgetEpisode:
    """The environment need no longer keep this sample's episode."""

    group: GroupId
    sample: int
    task: str = ""
    # Whether the episode's end, which its external agent reported, is durable; False: the episode was given up.
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
