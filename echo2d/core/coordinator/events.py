"""What goes into `CoordinatorState` and what comes out of it.

An event says what happened, an action says what to do, and a record says what to keep. Each package
of the core owns its own; this module joins them and adds the learner's requests. The runtime
handles the events that wait in its mailbox (at most 256), writes all their `Persist` records in one
transaction, and then performs the other actions in order, so nothing is acknowledged before it is
durable (I4).
"""

from dataclasses import dataclass, field
from typing import Literal

from echo2d.core.audit.events import AuditAction, AuditRecord, LimitsLearnt
from echo2d.core.base.ids import Digest, Epoch, GroupId, PeerId, PublishSeq, RequestId, Version
from echo2d.core.broadcast.events import BroadcastAction, BroadcastRecord, FormChosen
from echo2d.core.cluster.earned import EarnedKept, WorkerEarned
from echo2d.core.cluster.events import (
    ClusterAction,
    CopyLost,
    DialBackEnded,
    PeerConnected,
    PeerDisconnected,
    PeerPardoned,
    PeerRevoked,
    PeerSaid,
    Persist,
    PublishAsked,
    RemovalPlanned,
    Reply,
    VersionPublished,
    VersionRevoked,
)
from echo2d.core.protocol.trajectory import StepFigures, TrajectoryScore
from echo2d.core.tinker.events import (
    KeptClients,
    TinkerAction,
    TinkerEvent,
    TinkerRecord,
)
from echo2d.core.topology.uplink_rates import PeerRate
from echo2d.core.work.calls.events import CallEvent, GatewayAction
from echo2d.core.work.evaluation.events import Evaluated, EvaluationAction, EvaluationRecord
from echo2d.core.work.events import (
    EnvironmentStepped,
    EpisodeEnded,
    PromptDrawn,
    PromptFailed,
    PromptsEnded,
    RecoveredRollouts,
    RewardsProbed,
    RolloutAction,
    RolloutRecord,
    SampleScored,
)

# --- events: requests of the learner. Exactly one Reply answers each, at once or later.


@dataclass(frozen=True, slots=True)
class SessionAsked:
    """POST /v1/learner/session."""

    request: RequestId
    resume_step: int
    # The caller's identity, the same after its restarts; empty: it has none.
    learner: str = ""
    take_over: bool = False  # whether to end another learner's session
    # The step after which the learner ends; 0: it did not say.
    steps: int = 0


@dataclass(frozen=True, slots=True)
class RulesAsked:
    """GET /v1/learner/session: the rules of a session, without opening one."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class AliveTold:
    """POST /v1/learner/alive: the learner's process lives."""

    request: RequestId
    epoch: Epoch
    software: str = ""  # the learner's version of echo2d


@dataclass(frozen=True, slots=True)
class EpochAsked:
    """An upload of a version is about to begin, and asks whether its epoch is the current one."""

    request: RequestId
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class BatchAsked:
    """GET /v1/batches/{step}: answered when the batch is frozen.

    The runtime gives up after its long-poll time (`RequestGone`).
    """

    request: RequestId
    epoch: Epoch
    step: int


@dataclass(frozen=True, slots=True)
class CommitAsked:
    """POST /v1/batches/{step}/commit."""

    request: RequestId
    epoch: Epoch
    step: int
    batch_digest: Digest
    t_train_s: float
    # Scores of any trajectories of the batch; scores of other trajectories are ignored.
    scores: tuple[TrajectoryScore, ...] = ()
    figures: StepFigures | None = None  # for the curves


@dataclass(frozen=True, slots=True)
class RefuseAsked:
    """POST /v1/batches/{step}/refuse: the refused groups, each with a reason."""

    request: RequestId
    epoch: Epoch
    step: int
    groups: tuple[tuple[GroupId, str], ...]


@dataclass(frozen=True, slots=True)
class CheckpointAsked:
    """POST /v1/learner/checkpoint."""

    request: RequestId
    epoch: Epoch
    step: int


WorkerOrder = Literal["cordon", "uncordon", "drain"]


@dataclass(frozen=True, slots=True)
class WorkerOrdered:
    """POST /v1/workers/{peer}/cordon, uncordon or drain. The access table has the order already."""

    request: RequestId
    peer: PeerId
    order: WorkerOrder
    # Whether a drain gives the worker's leases to others at once.
    hand_over: bool = False


@dataclass(frozen=True, slots=True)
class EvaluationsAsked:
    """GET or POST /v1/evaluations: asks for the evaluations with a higher number than `after`."""

    request: RequestId
    after: int
    # A POST has this version evaluated; None: the request is a GET.
    epoch: Epoch | None = None
    version: Version | None = None


@dataclass(frozen=True, slots=True)
class RequestGone:
    """The caller of a waiting request hung up, or its long poll timed out: send no reply."""

    request: RequestId


# --- events: time


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """The time that `wake_at()` returned has come."""


CoordinatorEvent = (
    PeerConnected
    | PeerSaid
    | PeerDisconnected
    | PeerRevoked
    | PeerPardoned
    | RemovalPlanned
    | DialBackEnded
    | CopyLost
    | SessionAsked
    | RulesAsked
    | AliveTold
    | EpochAsked
    | PublishAsked
    | BatchAsked
    | CommitAsked
    | RefuseAsked
    | CheckpointAsked
    | EvaluationsAsked
    | WorkerOrdered
    | RequestGone
    | PromptDrawn
    | PromptFailed
    | PromptsEnded
    | SampleScored
    | RewardsProbed
    | EnvironmentStepped
    | EpisodeEnded
    | DeadlinePassed
    | CallEvent
    | TinkerEvent
)


# --- records: what to keep


@dataclass(frozen=True, slots=True)
class EpochOpened:
    """A learner session began."""

    epoch: Epoch
    resume_step: int
    learner: str = ""  # the identity of the learner; empty: it has none
    steps: int = 0  # the step after which the learner ends; 0: it did not say


@dataclass(frozen=True, slots=True)
class TotalsKept:
    """How many trajectories the run has trained and dropped since it began."""

    trained: int
    dropped: int


@dataclass(frozen=True, slots=True)
class CheckpointKept:
    """Steps up to `step` are durable at the learner: their batches and groups may be deleted."""

    step: int
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class RunFactsKept:
    """The run's facts, by name; `runtime/coordinator/run_facts.py` compares them."""

    facts: tuple[tuple[str, str], ...]


CoordinatorRecord = (
    EpochOpened
    | TotalsKept
    | EarnedKept
    | RunFactsKept
    | CheckpointKept
    | VersionPublished
    | VersionRevoked
    | BroadcastRecord
    | RolloutRecord
    | EvaluationRecord
    | AuditRecord
    | TinkerRecord
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered(RecoveredRollouts):
    """Everything durable of a run, as the ledger had it at the start."""

    publish_seq: PublishSeq
    published: tuple[VersionPublished, ...]  # in the order of publish_seq, without revoked versions
    rates: tuple[PeerRate, ...] = ()  # the one measured longest ago comes first
    form: FormChosen | None = None  # the one chosen last
    limits: tuple[LimitsLearnt, ...] = ()  # one for every audited class
    evaluated: tuple[Evaluated, ...] = ()
    # Paths of published versions whose copies are gone.
    lost: frozenset[str] = frozenset()
    # The convicted and the trusted workers, as the access table has them.
    convicted: frozenset[PeerId] = frozenset()
    trusted: frozenset[PeerId] = frozenset()
    learner: str = ""  # the identity of the learner that opened `epoch`
    steps: int = 0  # the step after which that learner ends
    # How many trajectories were trained and dropped up to the last commit.
    trained: int = 0
    dropped: int = 0
    # The worker that earned something last comes last.
    earned: tuple[WorkerEarned, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()  # as in `RunFactsKept`
    clients: KeptClients = field(default_factory=KeptClients)

    @staticmethod
    def nothing() -> "Recovered":
        """A run that has not begun."""
        return Recovered(
            epoch=Epoch(0),
            resume_step=0,
            next_group=GroupId(0),
            groups=(),
            frozen=(),
            committed=(),
            checkpoint=0,
            publish_seq=PublishSeq(0),
            published=(),
        )


# --- actions


CoordinatorAction = (
    Persist[CoordinatorRecord]
    | ClusterAction
    | BroadcastAction
    | RolloutAction
    | EvaluationAction
    | GatewayAction
    | AuditAction
    | TinkerAction
    | Reply
)
