"""What goes into `WorkerState` and what comes out: events (it happened), actions (do it).

Relay events and actions (`relay`) pass through the worker's machine and are listed in `state`.
"""

from dataclasses import dataclass

from echo2d.core.base.ids import Digest, FormId, LeaseId, PublishSeq, Version
from echo2d.core.protocol.control_messages import (
    Finish,
    LeaseGranted,
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
    """A message after the welcome; of SignedRoot and SegmentPage the shell makes other events."""

    message: ToPeer


@dataclass(frozen=True, slots=True)
class RootVerified:
    """A root signed by the run's key came over the control link."""

    root: Root


# --- events: slots and engines ----------------------------------------


@dataclass(frozen=True, slots=True)
class SnapshotReady:
    """The form's snapshot stands, verified, in the slot directory `path`, which is current now."""

    form: FormId
    version: Version
    digest: Digest
    path: str


@dataclass(frozen=True, slots=True)
class ApplyRejected:
    """The form could not become a snapshot; the current slot is as it was.

    lacks_base: because of chunks whose base is not here; all others stand in the spare slot.
    """

    form: FormId
    reason: str
    lacks_base: bool = False


@dataclass(frozen=True, slots=True)
class ArrivalFailed:
    """Frames of this form cannot be kept on this peer's disk; it stopped receiving them."""

    form: FormId
    reason: str


@dataclass(frozen=True, slots=True)
class ApplyCancelled:
    """Answers CancelApply, unless SnapshotReady or ApplyRejected came first; the spare slot is free."""

    form: FormId


@dataclass(frozen=True, slots=True)
class EngineRefitted:
    """All engines serve this version. memory_ok: their memory, read back, is the snapshot's; None: not checked."""

    version: Version
    digest: Digest
    pause_s: float
    memory_ok: bool | None


@dataclass(frozen=True, slots=True)
class EngineRefitFailed:
    """Not all engines serve this version. label: what all of them serve now, None if nothing or not the same.

    damaged: no engine has seen it, for its slot does not hold it any more; the slot was given up.
    """

    version: Version
    digest: Digest
    reason: str
    label: str | None
    damaged: bool = False


@dataclass(frozen=True, slots=True)
class LabelSpan:
    """Output tokens [start, end) of a sample were written by the version the engine knows by this label."""

    start: int
    end: int
    label: str


@dataclass(frozen=True, slots=True)
class SampleProgressed:
    """An engine made these output tokens; `spans` cover exactly them. finish: the sample's output ends with them."""

    lease: LeaseId
    attempt: int
    sample: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[LabelSpan, ...]
    finish: Finish | None


@dataclass(frozen=True, slots=True)
class GenerationFailed:
    """An engine gave the lease up; no further SampleProgressed of this attempt comes."""

    lease: LeaseId
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class EngineLost:
    """An engine serves nothing any more, and no refit is to blame."""

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


VersionEvent = (
    RootVerified | ArrivalFailed | SnapshotReady | ApplyRejected | ApplyCancelled
    | EngineRefitted | EngineRefitFailed | EngineLost
)  # fmt: skip  # those for `Versions`


# --- actions ----------------------------------------


@dataclass(frozen=True, slots=True)
class SendControl:
    """Send over the control link, which is up."""

    message: ToCoordinator


@dataclass(frozen=True, slots=True)
class StartGeneration:
    """Generate all samples of this lease; answered by SampleProgressed of each, or one GenerationFailed."""

    lease: LeaseGranted


@dataclass(frozen=True, slots=True)
class AbortGeneration:
    """Stop generating this attempt; nothing of it needs to be reported."""

    lease: LeaseId
    attempt: int


@dataclass(frozen=True, slots=True)
class HoldEngines:
    """No token from now on, or (hold=False) tokens again; refits may come between."""

    hold: bool


@dataclass(frozen=True, slots=True)
class IndexRoot:
    """The root is accepted: judge the form's segments by it."""

    root: Root


@dataclass(frozen=True, slots=True)
class KeepPublishSeq:
    """Roots below this publish_seq are refused from now on, also after a restart."""

    publish_seq: PublishSeq


@dataclass(frozen=True, slots=True)
class ApplyForm:
    """Write the form's chunks into the spare slot as they arrive, verify, flip. One at a time.

    stands: the snapshot, which stands in the spare slot: if it is intact, flipping is all there is to do.
    """

    form: FormId
    stands: Digest | None = None


@dataclass(frozen=True, slots=True)
class CancelApply:
    """Stop applying this form."""

    form: FormId


@dataclass(frozen=True, slots=True)
class RefitEngines:
    """Make all engines serve the snapshot in the slot directory `path`. One at a time."""

    version: Version
    digest: Digest
    path: str


@dataclass(frozen=True, slots=True)
class DropForm:
    """Nobody needs this form from here any more."""

    form: FormId


@dataclass(frozen=True, slots=True)
class ShutDown:
    """End the process in order, after what was sent before has gone out."""

    reason: str


@dataclass(frozen=True, slots=True)
class WorkerNote:
    """One line for the log."""

    text: str


LeaseAction = SendControl | StartGeneration | AbortGeneration
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
    """A verified snapshot in a slot directory, as found at start."""

    key: VersionKey
    path: str
