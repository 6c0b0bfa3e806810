"""What goes into `CoordinatorState` and what comes out: events (it happened), actions (do it), records (keep it).

Each package of the core owns its own; here they come together, with the learner's requests. The runtime handles all
events that wait in its mailbox (at most 256), writes the `Persist` records of all of them in one transaction, then
performs the other actions in order; so nothing is acknowledged before it is durable (I4).
"""

from dataclasses import dataclass
from typing import Any

from echo2d.core.base.ids import Digest, Epoch, GroupId, PublishSeq, RequestId
from echo2d.core.broadcast.events import BroadcastAction, BroadcastRecord, FormChosen
from echo2d.core.cluster.events import (
    ClusterAction,
    DialBackEnded,
    PeerConnected,
    PeerDisconnected,
    PeerRevoked,
    PeerSaid,
    Persist,
    PublishAsked,
    RemovalPlanned,
    VersionPublished,
    VersionRevoked,
)
from echo2d.core.gateway.events import CallEvent, GatewayAction
from echo2d.core.rollouts.events import (
    PromptDrawn,
    RecoveredRollouts,
    RolloutAction,
    RolloutRecord,
    SampleScored,
)
from echo2d.core.topology.uplink_rates import PeerRate

# --- events: the learner asks. Each is answered by exactly one Reply, at once or later.


@dataclass(frozen=True, slots=True)
class SessionAsked:
    """POST /v1/learner/session."""

    request: RequestId
    resume_step: int


@dataclass(frozen=True, slots=True)
class EpochAsked:
    """Bytes of a version are about to be taken: is its epoch in force?"""

    request: RequestId
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class BatchAsked:
    """GET /v1/batches/{step}: answered when the batch is frozen; the runtime gives up after its long-poll time."""

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


@dataclass(frozen=True, slots=True)
class RefuseAsked:
    """POST /v1/batches/{step}/refuse: these groups, each with a reason."""

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


@dataclass(frozen=True, slots=True)
class RequestGone:
    """The caller of a waiting request hung up or its long poll ran out; it must not be answered any more."""

    request: RequestId


# --- events: time


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """`wake_at()` has come."""


CoordinatorEvent = (
    PeerConnected | PeerSaid | PeerDisconnected | PeerRevoked | RemovalPlanned | DialBackEnded
    | SessionAsked | EpochAsked | PublishAsked | BatchAsked | CommitAsked | RefuseAsked | CheckpointAsked
    | RequestGone | PromptDrawn | SampleScored | DeadlinePassed | CallEvent
)  # fmt: skip


# --- records: what is durable


@dataclass(frozen=True, slots=True)
class EpochOpened:
    epoch: Epoch
    resume_step: int


@dataclass(frozen=True, slots=True)
class CheckpointKept:
    """Steps <= step are durable at the learner: their batches and groups may be deleted."""

    step: int
    epoch: Epoch


CoordinatorRecord = (
    EpochOpened
    | CheckpointKept
    | VersionPublished
    | VersionRevoked
    | BroadcastRecord
    | RolloutRecord
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered(RecoveredRollouts):
    """Everything durable of a run, read from the ledger at start; the empty run is `Recovered.nothing()`."""

    publish_seq: PublishSeq
    published: tuple[VersionPublished, ...]  # by publish_seq, revoked ones left out
    rates: tuple[PeerRate, ...] = ()  # the one measured longest ago first
    form: FormChosen | None = None  # the one chosen last
    lost: frozenset[str] = frozenset()  # paths of published versions of which no copy is left

    @staticmethod
    def nothing() -> "Recovered":
        return Recovered(
            epoch=Epoch(0), resume_step=0, next_cursor=0, next_group=GroupId(0), groups=(), frozen=(), committed=(),
            checkpoint=0, publish_seq=PublishSeq(0), published=(),
        )  # fmt: skip


# --- actions


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer a waiting request. status: an HTTP status. body: JSON-able, or the batch bytes (digest in `digest`)."""

    request: RequestId
    status: int
    body: dict[str, Any] | bytes
    digest: Digest | None = None


CoordinatorAction = (
    Persist[CoordinatorRecord]
    | ClusterAction
    | BroadcastAction
    | RolloutAction
    | GatewayAction
    | Reply
)
