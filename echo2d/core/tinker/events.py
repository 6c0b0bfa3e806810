"""The calls of the Tinker API that reach the core, and what is kept of them.

A client's call names its caller, the token with which it came; a caller sees nothing of another one. The learner asks
for the next operation, and reports how it ended. Exactly one Reply answers each call, at once or later.
Not here: HTTP and the form of bodies (`net/tinker`), what an operation computes (the learner).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NewType

from echo2d.core.base.ids import Digest, Epoch, RequestId, Version
from echo2d.core.protocol.sampling import Sampling
from echo2d.core.tinker.futures import FutureId, Outcome
from echo2d.core.tinker.operations import ModelId, Operation

SessionName = NewType("SessionName", str)
SamplerName = NewType("SamplerName", str)

# What the API calls the kinds of layers that an adapter may have.
LAYERS = ("train_attn", "train_mlp", "train_unembed")


# --- calls of clients


@dataclass(frozen=True, slots=True)
class OpenSession:
    """create_session. session: a name that was never used before."""

    session: SessionName


@dataclass(frozen=True, slots=True)
class KeepSession:
    """session_heartbeat."""

    session: SessionName


@dataclass(frozen=True, slots=True)
class EndSession:
    """sessions/SESSION/finish."""

    session: SessionName


@dataclass(frozen=True, slots=True)
class Submit:
    """create_model, load_weights, forward_backward, optim_step, save_weights, save_weights_for_sampler."""

    operation: Operation


@dataclass(frozen=True, slots=True)
class AwaitResult:
    """retrieve_future."""

    future: FutureId


@dataclass(frozen=True, slots=True)
class ShowQueue:
    """retrieve_future, whose result has not come in time: answered with what it waits for."""

    future: FutureId


@dataclass(frozen=True, slots=True)
class OpenSampler:
    """create_sampling_session: a sampler of a checkpoint, or of the base model (None)."""

    sampler: SamplerName
    session: SessionName
    base: str | None
    path: str | None


@dataclass(frozen=True, slots=True)
class ShowSampler:
    """samplers/SAMPLER."""

    sampler: SamplerName


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """What a sampler draws: `count` sequences after one prompt."""

    prompt: bytes  # token ids, int32
    count: int
    tokens_max: int  # of a sequence
    sampling: Sampling
    stop_token_ids: tuple[int, ...]
    stops: tuple[str, ...]  # texts that end a sequence, at the token that completes one of them
    rng_seed: int | None
    # What the learner must find out about the prompt, as a message of the API's wire; empty: nothing.
    scored: bytes = b""
    scores_bytes: int = 0  # of what it finds, and of the sequences that wait for it
    # How many of the most likely tokens it must find at each position of the sequences, after they are drawn.
    top_tokens: int = 0


@dataclass(frozen=True, slots=True)
class SampleAsked:
    """asample. number: the client's, which it uses for one call of this sampler."""

    sampler: SamplerName
    number: int
    digest: Digest  # of all that the client sent
    count: int  # of sequences
    order: SampleOrder | None
    fault: str | None = None  # why nothing can be drawn


@dataclass(frozen=True, slots=True)
class CancelSample:
    """cancel_future."""

    future: FutureId


@dataclass(frozen=True, slots=True)
class ShowModel:
    """get_info, training_runs/MODEL."""

    model: ModelId


@dataclass(frozen=True, slots=True)
class ListModels:
    """training_runs. offset, limit: which part of the list, which begins with the newest model."""

    offset: int
    limit: int


@dataclass(frozen=True, slots=True)
class ListCheckpoints:
    """checkpoints, training_runs/MODEL/checkpoints. model: None lists those of all models."""

    model: ModelId | None
    offset: int
    limit: int


@dataclass(frozen=True, slots=True)
class ShowCheckpoint:
    """weights_info."""

    path: str


@dataclass(frozen=True, slots=True)
class DeleteCheckpoint:
    path: str


@dataclass(frozen=True, slots=True)
class ExpireCheckpoint:
    """training_runs/MODEL/checkpoints/NAME/ttl. ttl_s: None keeps it for ever."""

    path: str
    ttl_s: float | None


ClientCall = (
    OpenSession
    | KeepSession
    | EndSession
    | Submit
    | AwaitResult
    | ShowQueue
    | OpenSampler
    | ShowSampler
    | SampleAsked
    | CancelSample
    | ShowModel
    | ListModels
    | ListCheckpoints
    | ShowCheckpoint
    | DeleteCheckpoint
    | ExpireCheckpoint
)


@dataclass(frozen=True, slots=True)
class ClientAsked:
    """A call of a client. wall_s: seconds since 1970, for what outlives this process."""

    request: RequestId
    caller: str
    wall_s: float
    call: ClientCall


# --- calls of the learner


@dataclass(frozen=True, slots=True)
class OperationAsked:
    """The learner is idle: answered with the next operation, when there is one."""

    request: RequestId
    epoch: Epoch
    # The optimizer steps whose state has come to the learner's disk since it asked last. They may be told again.
    saved: tuple["StepSaved", ...] = ()


@dataclass(frozen=True, slots=True)
class OperationEnded:
    """The learner has run an operation. A repeated report changes nothing."""

    request: RequestId
    epoch: Epoch
    wall_s: float
    model: ModelId
    number: int
    result: Outcome


# --- samples


@dataclass(frozen=True, slots=True)
class SampleEnded:
    """What `DrawSample` asked for has been drawn, or failed. again: another try may draw it. gone: no worker holds its
    version any more.
    """

    future: FutureId
    result: Outcome
    again: bool = False
    gone: bool = False
    tokens: int = 0  # of all sequences


@dataclass(frozen=True, slots=True)
class OperationLost:
    """The learner cannot get this operation: its body has left the ledger with its session."""

    model: ModelId
    number: int


TinkerEvent = ClientAsked | OperationAsked | OperationEnded | OperationLost | SampleEnded


# --- actions


@dataclass(frozen=True, slots=True)
class DrawSample:
    """Have workers draw this by exactly this version; ended by SampleEnded."""

    future: FutureId
    caller: str
    order: SampleOrder
    version: Version


@dataclass(frozen=True, slots=True)
class StopSample:
    """Stop drawing: the client needs this sample no longer. It may have ended already."""

    future: FutureId


@dataclass(frozen=True, slots=True)
class GiveOperation:
    """Answer the learner's call with an order whose body is that of a taken operation, from the ledger.

    order: what `Reply` would have, as a map without `body`.
    """

    request: RequestId
    order: Mapping[str, Any]
    model: ModelId
    number: int


TinkerAction = DrawSample | StopSample | GiveOperation


# --- records


@dataclass(frozen=True, slots=True)
class ModelMade:
    """A client has made a model. base: the name by which it asked for the base model."""

    model: ModelId
    caller: str
    made_at: float  # seconds since 1970
    base: str
    rank: int  # 0: full weights
    layers: tuple[str, ...]  # which of LAYERS have an adapter
    metadata: str  # the client's own, as JSON
    # How the learner makes it: with random weights of this seed, or from a saved folder, with its optimizer state or
    # without.
    seed: int = 0
    folder: str = ""
    optimizer: bool = False


@dataclass(frozen=True, slots=True)
class ModelForgotten:
    """It is listed no longer."""

    model: ModelId


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """A checkpoint is on the learner's disk, in its folder `folder`."""

    path: str  # tinker://MODEL/KIND/NAME
    caller: str
    made_at: float  # seconds since 1970
    expires_at: float | None
    folder: str
    bytes: int
    model: ModelMade
    metadata: str  # the client's own, as JSON


@dataclass(frozen=True, slots=True)
class CheckpointDropped:
    path: str


@dataclass(frozen=True, slots=True)
class SessionOpened:
    session: SessionName
    caller: str


@dataclass(frozen=True, slots=True)
class SessionOver:
    """With it go its samplers, and the operations and steps of its models."""

    session: SessionName


@dataclass(frozen=True, slots=True)
class SamplerOpened:
    """A sampler draws from the weights in `folder` of the learner's disk; empty: those of the base model."""

    sampler: SamplerName
    caller: str
    session: SessionName
    folder: str
    base: str  # the name by which the client asked for the base model
    path: str | None  # the checkpoint
    # Whose weights these are, and after how many optimizer steps of it. None: not known.
    model: ModelId | None = None
    steps: int = 0
    # Whether it goes on to newer weights of the model, when its client saves them.
    follows: bool = False
    # Whether they are full weights, and not an adapter.
    whole: bool = False


@dataclass(frozen=True, slots=True)
class SamplerOver:
    sampler: SamplerName


@dataclass(frozen=True, slots=True)
class OperationTaken:
    """A client's operation, with its body, before its future is told."""

    operation: Operation


@dataclass(frozen=True, slots=True)
class OperationOver:
    """An operation has ended, and its client may be told."""

    model: ModelId
    number: int
    result: Outcome
    # Whether the learner may have to compute it again, or whether it spoils the next optimizer step.
    needed: bool


@dataclass(frozen=True, slots=True)
class GradientDropped:
    """The gradients with these numbers were dropped by an optimizer step, the last of them."""

    model: ModelId
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class ResultForgotten:
    """Nobody needs the result of this operation any more."""

    model: ModelId
    number: int


@dataclass(frozen=True, slots=True)
class StepSaved:
    """The state of a model after this optimizer step is on the learner's disk, so the bodies of its operations up to
    this one are needed no longer.
    """

    model: ModelId
    number: int


TinkerRecord = (
    ModelMade
    | ModelForgotten
    | CheckpointSaved
    | CheckpointDropped
    | SessionOpened
    | SessionOver
    | SamplerOpened
    | SamplerOver
    | OperationTaken
    | OperationOver
    | GradientDropped
    | ResultForgotten
    | StepSaved
)


@dataclass(frozen=True, slots=True)
class KeptOperation:
    """An operation as the ledger has it. Its body stays there."""

    operation: Operation
    # None: the operation has not ended, or its client has had the result.
    result: Outcome | None
    # Whether it has ended, whether it failed, and whether it is still needed, as in `OperationOver`.
    ended: bool
    failed: bool
    needed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptClients:
    """All that is durable of the clients of the Tinker API. What came last is last in each list."""

    models: tuple[ModelMade, ...] = ()
    checkpoints: tuple[CheckpointSaved, ...] = ()
    sessions: tuple[SessionOpened, ...] = ()
    samplers: tuple[SamplerOpened, ...] = ()
    operations: tuple[KeptOperation, ...] = ()  # of each model in the order of their numbers
    steps: tuple[StepSaved, ...] = ()  # the newest of each model
