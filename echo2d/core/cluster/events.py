"""What goes into `CoordinatorState` and what comes out: events (it happened), actions (do it), records (keep it).

The runtime handles all events that wait in its mailbox (at most 256), writes the `Persist` records of all of them in
one transaction, then performs the other actions in order; so nothing is acknowledged before it is durable (I4).
A *session* is one WebSocket connection of a peer; a *request* is one waiting HTTP call.
"""

from dataclasses import dataclass
from typing import Any, Literal, NewType

from echo2d.core.base.ids import Digest, Epoch, GroupId, LeaseId, PeerId, PublishSeq, RunId, Version
from echo2d.core.capacity.model import GAMMA, Mode
from echo2d.core.capacity.prices import NamedPrice
from echo2d.core.gateway.events import CallAction, CallEvent, GatewayRules
from echo2d.core.protocol.control_messages import Address, HeldLease, Hello, ToCoordinator, ToPeer, VersionKey
from echo2d.core.protocol.trajectory import NOTHING, GroupRecord, Partial, TrajectoryRecord
from echo2d.core.topology.uplink_rates import PeerRate

SessionId = NewType("SessionId", int)  # one per accepted WebSocket, never reused within a process
RequestId = NewType("RequestId", int)  # one per waiting HTTP call


@dataclass(frozen=True, slots=True)
class CoordinatorRules:
    """The numbers the operator chose. R = trajectories_per_step, kappa = publish_every, S = staleness_max."""

    run_id: RunId
    staleness_max: int
    publish_every: int | None  # None: "auto"
    trajectories_per_step: int
    group_size: int
    max_new_tokens: int
    temperature: float
    top_p: float
    stop_token_ids: tuple[int, ...]
    vocab_size: int
    over_stale: str  # "drop" | "mask"
    filter_zero_variance: bool
    shape: str  # "auto" | "star" | "chain"
    chains: int
    mode: Mode = "background"  # "exclusive": a worker generates nothing while a version is on its way to it
    p2p: bool = True  # workers pass versions on
    activation: Literal["all", "auto"] = "all"  # who gets leases: everybody, or the cheapest that are enough
    by_cost: bool = True  # or in any order
    gamma: float = GAMMA  # throughput that is provided, over what is needed
    prices: tuple[NamedPrice, ...] = ()
    learner_usd_per_h: float = 0.0  # shown, decides nothing
    delta: bool = True  # versions spread as differences from one that most workers have
    disk_bytes_max: int = 1 << 62  # that copies of versions may take; past it bases go
    lease_silence_s: float = 15.0
    heartbeat_s: float = 2.0
    gateway: GatewayRules | None = None  # None: it is off


# --- events: peers ----------------------------------------


@dataclass(frozen=True, slots=True)
class PeerConnected:
    """A peer with a valid credential opened a session and said hello."""

    session: SessionId
    peer: PeerId
    hello: Hello


@dataclass(frozen=True, slots=True)
class PeerSaid:
    """A message after the hello."""

    session: SessionId
    message: ToCoordinator


@dataclass(frozen=True, slots=True)
class PeerDisconnected:
    """The session is gone: closed, reset, timed out or broke the protocol."""

    session: SessionId
    reason: str


@dataclass(frozen=True, slots=True)
class PeerRevoked:
    """The peer's credential was revoked."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class RemovalPlanned:
    """The peer will be taken away by whoever rented it: it gets no more leases, and finishes what it holds."""

    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class DialBackEnded:
    """Answers DialBack. fault: why nobody, or somebody else, answered; empty: that very peer did."""

    session: SessionId
    fault: str


# --- events: learner (each is answered by exactly one Reply, at once or later) ----------------------------------------


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
class PublishAsked:
    """POST /v1/versions, after the snapshot was copied into the run directory (`path`, relative) and hashed."""

    request: RequestId
    epoch: Epoch
    version: Version
    digest: Digest
    path: str
    full_bytes: int


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


# --- events: data plane, time ----------------------------------------


@dataclass(frozen=True, slots=True)
class PromptDrawn:
    """Prompt number `cursor` of the task (answers DrawPrompt)."""

    cursor: int
    tokens: bytes


@dataclass(frozen=True, slots=True)
class SampleScored:
    """The reward of one trajectory (answers ScoreSample); None: the reward failed, `reason` says how."""

    group: GroupId
    sample: int
    reward: float | None
    reason: str


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """`wake_at()` has come."""


Event = (
    PeerConnected | PeerSaid | PeerDisconnected | PeerRevoked | RemovalPlanned | DialBackEnded
    | SessionAsked | EpochAsked | PublishAsked | BatchAsked | CommitAsked | RefuseAsked | CheckpointAsked
    | RequestGone | PromptDrawn | SampleScored | DeadlinePassed | CallEvent
)  # fmt: skip


# --- records: what is durable ----------------------------------------


@dataclass(frozen=True, slots=True)
class EpochOpened:
    epoch: Epoch
    resume_step: int


@dataclass(frozen=True, slots=True)
class VersionPublished:
    publish_seq: PublishSeq
    epoch: Epoch
    version: Version
    digest: Digest
    path: str
    full_bytes: int


@dataclass(frozen=True, slots=True)
class FormChosen:
    """The version of this publish spreads in frames of this size, as a delta from the snapshot `base`, or in full.

    A later one of the same publish replaces it.
    """

    publish_seq: PublishSeq
    base: Digest | None
    frame_bytes: int


@dataclass(frozen=True, slots=True)
class VersionRevoked:
    epoch: Epoch
    version: Version
    digest: Digest


@dataclass(frozen=True, slots=True)
class PromptTaken:
    """The cursor's prompt became this group; the next prompt is cursor + 1."""

    group: GroupId
    cursor: int
    prompt: bytes


@dataclass(frozen=True, slots=True)
class LeaseGiven:
    """An attempt that was granted; `served` by its worker then. base: what its sample had before, mostly NOTHING."""

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
        """No token of its trajectory is of an older version."""
        begun = self.base.version_min
        return self.served.version if begun is None else min(begun, self.served.version)


@dataclass(frozen=True, slots=True)
class SampleKept:
    """An accepted result, not yet scored (reward is NaN until SampleRewarded).

    trajectory: with what the attempt went on from; fingerprint: of the worker's message, so that a repeat is known.
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


@dataclass(frozen=True, slots=True)
class GroupDropped:
    """The group left for good, with everything it had: aged out, filtered, failed, refused."""

    group: GroupId
    reason: str


@dataclass(frozen=True, slots=True)
class BatchFrozen:
    """Batch `step` is these groups in this order; replaces an earlier composition (after a refusal)."""

    step: int
    digest: Digest
    groups: tuple[GroupId, ...]
    refusals: int


@dataclass(frozen=True, slots=True)
class BatchCommitted:
    step: int
    epoch: Epoch
    digest: Digest
    t_train_s: float


@dataclass(frozen=True, slots=True)
class CheckpointKept:
    """Steps <= step are durable at the learner: their batches and groups may be deleted."""

    step: int
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class RatesMeasured:
    """What a version has shown of these peers; it replaces what was known of them."""

    rates: tuple[PeerRate, ...]


Record = (
    EpochOpened | VersionPublished | VersionRevoked | PromptTaken | LeaseGiven | SampleKept | SampleRewarded
    | GroupDropped | BatchFrozen | BatchCommitted | CheckpointKept | RatesMeasured | FormChosen
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A group that is not dropped and not deleted, as the ledger gives it back: unscored rewards are NaN."""

    record: GroupRecord
    cursor: int


@dataclass(frozen=True, slots=True)
class Answered:
    """A result that was accepted: repeats of it are told by the fingerprint of the worker's message."""

    key: HeldLease
    sample: int
    fingerprint: bytes


@dataclass(frozen=True, slots=True)
class Recovered:
    """Everything durable of a run, read from the ledger at start; the empty run is `Recovered.nothing()`."""

    epoch: Epoch
    resume_step: int
    publish_seq: PublishSeq
    published: tuple[VersionPublished, ...]  # by publish_seq, revoked ones left out
    next_cursor: int
    next_group: GroupId
    groups: tuple[StoredGroup, ...]  # by group id
    frozen: tuple[BatchFrozen, ...]  # by step; only steps > checkpoint
    committed: tuple[BatchCommitted, ...]  # by step; only steps > checkpoint, newest epoch wins
    checkpoint: int
    given: tuple[LeaseGiven, ...] = ()  # of stored groups, in the order in which they were granted
    answered: tuple[Answered, ...] = ()  # of stored groups, in the order in which they were accepted
    rates: tuple[PeerRate, ...] = ()  # the one measured longest ago first
    form: FormChosen | None = None  # the one chosen last
    lost: frozenset[str] = frozenset()  # paths of published versions of which no copy is left

    @staticmethod
    def nothing() -> "Recovered":
        return Recovered(Epoch(0), 0, PublishSeq(0), (), 0, GroupId(0), (), (), (), 0)


# --- actions ----------------------------------------


@dataclass(frozen=True, slots=True)
class Persist:
    """Make this durable before any later action of the same turn is performed."""

    record: Record


@dataclass(frozen=True, slots=True)
class Send:
    """Send to the peer of this session (dropped silently if the session has gone)."""

    session: SessionId
    message: ToPeer


@dataclass(frozen=True, slots=True)
class SendRoot:
    """Sign these root bytes and send them as SignedRoot to these sessions."""

    sessions: tuple[SessionId, ...]
    root: bytes


@dataclass(frozen=True, slots=True)
class CloseSession:
    """Close after what was sent before has gone out."""

    session: SessionId


@dataclass(frozen=True, slots=True)
class DialBack:
    """Dial the peer of this session: whoever answers has to prove that it knows the secret."""

    session: SessionId
    peer: PeerId
    address: Address
    secret: bytes


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer a waiting request. status: an HTTP status. body: JSON-able, or the batch bytes (digest in `digest`)."""

    request: RequestId
    status: int
    body: dict[str, Any] | bytes
    digest: Digest | None = None


@dataclass(frozen=True, slots=True)
class DrawPrompt:
    cursor: int


@dataclass(frozen=True, slots=True)
class ScoreSample:
    """Score the output of one sample of the group whose prompt is number `cursor`."""

    group: GroupId
    sample: int
    cursor: int
    tokens: bytes


@dataclass(frozen=True, slots=True)
class DeleteVersion:
    """The snapshot copy in the run directory is of no further use."""

    path: str


@dataclass(frozen=True, slots=True)
class StopRun:
    """The run cannot go on; the process ends with exit code 1 and this reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class Note:
    """A fact for logs and `status`: kind is a short word, text one line. group: the one it is about, if any."""

    kind: str
    text: str
    group: GroupId | None = None


Action = (
    Persist | Send | SendRoot | CloseSession | DialBack | Reply | DrawPrompt | ScoreSample | DeleteVersion | StopRun
    | Note | CallAction
)  # fmt: skip
