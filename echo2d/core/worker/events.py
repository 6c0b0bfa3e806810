"""The events that `WorkerState` handles and the actions that it returns.

An event says what happened, an action what to do. Events and actions of the relay
(`relay/events.py`) pass through the worker's machine and are listed in `state`.
"""

from dataclasses import dataclass

from echo2d.core.base.ids import Digest, FormId, LeaseId, PublishSeq, Version
from echo2d.core.protocol.columns import Columns
from echo2d.core.protocol.control_messages import (
    Finish,
    LeaseGranted,
    ReadPrompt,
    ScoreAnswers,
    ToCoordinator,
    ToPeer,
    VersionKey,
    Welcome,
)
from echo2d.core.weights.signed_index import Root

# --- events: control link ----------------------------------------


@dataclass(frozen=True, slots=True)
class ControlUp:
    """The coordinator accepted the connection."""

    welcome: Welcome


@dataclass(frozen=True, slots=True)
class ControlDown:
    """The connection is gone; the shell dials again."""


@dataclass(frozen=True, slots=True)
class CoordinatorSaid:
    """A message came after the welcome. SignedRoot and SegmentPage become other events instead."""

    message: ToPeer


@dataclass(frozen=True, slots=True)
class RootVerified:
    """A root signed by the run's key came over the control link."""

    root: Root


# --- events: slots and engines ----------------------------------------


@dataclass(frozen=True, slots=True)
class SnapshotReady:
    """The form's snapshot is verified in the slot directory `path`, which is current now."""

    form: FormId
    version: Version
    digest: Digest
    path: str


@dataclass(frozen=True, slots=True)
class ApplyRejected:
    """The form could not become a snapshot; the current slot is as it was."""

    form: FormId
    reason: str
    # Whether the form is a delta whose base, or a chunk of that base, is missing here.
    lacks_base: bool = False


@dataclass(frozen=True, slots=True)
class ArrivalFailed:
    """This peer's disk cannot keep frames of this form; the peer stopped receiving them."""

    form: FormId
    reason: str


@dataclass(frozen=True, slots=True)
class ApplyCancelled:
    """Applying has stopped and the spare slot is free.

    Answers CancelApply, unless SnapshotReady or ApplyRejected came first.
    """

    form: FormId


@dataclass(frozen=True, slots=True)
class EngineRefitted:
    """All engines serve this version; generation paused for `pause_s` seconds."""

    version: Version
    digest: Digest
    pause_s: float
    # Whether the engines' memory, read back, equals the snapshot; None: not checked.
    memory_ok: bool | None
    # The tokens of all engines whose KV caches the refit dropped.
    recomputed_tokens: int = 0
    # How long an engine takes to recompute them, besides the pause; None: not known.
    recompute_s: float | None = None
    # The labels of all versions that every engine holds now.
    held: tuple[str, ...] = ()
    # How many they hold at most, if these are fewer than they were told to.
    held_max: int | None = None


@dataclass(frozen=True, slots=True)
class EngineRefitFailed:
    """A refit failed: not all engines serve this version."""

    version: Version
    digest: Digest
    reason: str
    # The version that all engines serve now; None if they serve none, or different ones.
    label: str | None
    # Whether the slot no longer holds the snapshot and was given up; then no engine loaded it.
    damaged: bool = False
    # As in EngineRefitted.
    held: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LabelSpan:
    """The version with this engine label wrote output tokens [start, end) of a sample."""

    start: int
    end: int
    label: str


@dataclass(frozen=True, slots=True)
class SampleProgressed:
    """An engine made these output tokens, which `spans` cover exactly."""

    lease: LeaseId
    attempt: int
    sample: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[LabelSpan, ...]
    # Why the sample's output ends with these tokens; None: it continues.
    finish: Finish | None
    columns: Columns = ()  # of these tokens


@dataclass(frozen=True, slots=True)
class GenerationFailed:
    """An engine gave the lease up; no SampleProgressed of this attempt follows."""

    lease: LeaseId
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class EngineLost:
    """An engine no longer serves anything, and no refit was the cause."""

    reason: str


# --- events: operator ----------------------------------------


@dataclass(frozen=True, slots=True)
class StopAsked:
    """The operator stops this worker."""

    reason: str


@dataclass(frozen=True, slots=True)
class LeaveAsked:
    """The machine will be taken away soon: finish what is leased, then end."""

    reason: str


# The events that `WorkerVersions` handles.
VersionEvent = (
    RootVerified | ArrivalFailed | SnapshotReady | ApplyRejected | ApplyCancelled
    | EngineRefitted | EngineRefitFailed | EngineLost
)  # fmt: skip


# --- actions ----------------------------------------


@dataclass(frozen=True, slots=True)
class SendControl:
    """Send this message over the control link, which is up."""

    message: ToCoordinator


@dataclass(frozen=True, slots=True)
class StartGeneration:
    """Generate all samples of this lease.

    Answered by SampleProgressed of each sample, or by one GenerationFailed.
    """

    lease: LeaseGranted


@dataclass(frozen=True, slots=True)
class StartScoring:
    """Score these answers of other workers, or read this prompt. The reply is a message."""

    order: ScoreAnswers | ReadPrompt


@dataclass(frozen=True, slots=True)
class AbortGeneration:
    """Stop generating this attempt, and report nothing more about it."""

    lease: LeaseId
    attempt: int


@dataclass(frozen=True, slots=True)
class HoldEngines:
    """Make the engines stop generating (hold=True) or continue; a refit may come in between."""

    hold: bool


@dataclass(frozen=True, slots=True)
class IndexRoot:
    """The root is accepted: verify the form's segments against it."""

    root: Root


@dataclass(frozen=True, slots=True)
class KeepPublishSeq:
    """Remember durably that new forms below this publish_seq are refused."""

    publish_seq: PublishSeq


@dataclass(frozen=True, slots=True)
class ApplyForm:
    """Write the form's chunks into the spare slot as they arrive, verify them, make it current.

    Only one form is applied at a time.
    """

    form: FormId
    # The digest of the form's snapshot, if the snapshot is in the spare slot already: if it is intact,
    # the slot only has to be made current.
    stands: Digest | None = None


@dataclass(frozen=True, slots=True)
class CancelApply:
    """Stop applying this form."""

    form: FormId


@dataclass(frozen=True, slots=True)
class RefitEngines:
    """Make all engines load the snapshot in the slot directory `path`; one refit at a time."""

    version: Version
    digest: Digest
    path: str
    staleness_max: int = 0  # as in `Welcome`
    # The labels of versions that the engines hold already and go on holding, and how many versions they hold at most
    # (`HeldVersions`).
    kept: tuple[str, ...] = ()
    most: int = 1


@dataclass(frozen=True, slots=True)
class DropForm:
    """Delete this form's frames; no other peer needs them from here."""

    form: FormId


@dataclass(frozen=True, slots=True)
class ShutDown:
    """End the process properly, after everything sent so far has gone out."""

    reason: str


@dataclass(frozen=True, slots=True)
class WorkerNote:
    """Write this line to the log."""

    text: str


LeaseAction = SendControl | StartGeneration | StartScoring | AbortGeneration
VersionAction = (
    SendControl
    | IndexRoot
    | KeepPublishSeq
    | ApplyForm
    | CancelApply
    | RefitEngines
    | DropForm
    | WorkerNote
)


@dataclass(frozen=True, slots=True)
class Standing:
    """A verified snapshot that was found in a slot directory at start."""

    key: VersionKey
    path: str
