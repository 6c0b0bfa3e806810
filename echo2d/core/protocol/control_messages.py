"""The control link: every message between the coordinator and a peer. The docstrings here are the protocol text.

One WebSocket per peer, dialled out by the peer; each message is one binary frame (`codec.Codec`, at most 4 MiB). The
first message is the peer's `Hello`; the coordinator answers `Welcome` or `Refused` and nothing else comes before that.

    peer -> coordinator                                     coordinator -> peer
    Hello                                                   Welcome | Refused
    Heartbeat                        every heartbeat_s
    SegmentEncoded, FormEncoded, EncodeFailed,
    DeltasKept                                  (seed)      EncodeVersion, ForgetForm               (to the seed)
    SegmentsWanted                                          SignedRoot, SegmentPage
    EdgeBroken, FrameAccused, TransferReport                PlanEdges
    VersionVerified, ApplyFailed, RefitDone, RefitFailed    VersionsRevoked
    LeaseProgress, SampleFinished, LeaseFailed              LeaseGranted, LeaseCancelled, SampleAnswered
    Leaving, Goodbye                                        Drain, DialledBack

Tokens travel as little-endian int32, logprobs as little-endian float32, both as bytes (`trajectory.pack_tokens`).
Durations are seconds left or measured, never clock values. Versions are named together with their snapshot digest.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from echo2d.core.base.codec import Codec
from echo2d.core.base.ids import (
    Digest,
    Epoch,
    FormId,
    FrameId,
    Generation,
    GroupId,
    LeaseId,
    PeerId,
    PlanId,
    PublishSeq,
    RunId,
    SegmentId,
    StripeId,
    Version,
)
from echo2d.core.weights.delta_chain import KeptDelta
from echo2d.core.weights.encoding import FormKind

PROTOCOL_VERSION = 1
PROGRESS_S = 2.0  # a lease is reported at least so often

PeerKind = Literal["worker", "relay", "seed"]
Finish = Literal["stop", "length"]
RefusalReason = Literal[
    "protocol", "run", "credential", "revoked", "superseded", "flapping", "busy"
]


# --- parts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Address:
    """Where a peer's link listener can be dialled."""

    host: str
    port: int


class VersionKey(NamedTuple):
    """A published version: which one, and which bytes exactly."""

    version: Version
    digest: Digest


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Output tokens [start, end) of one sample were written by this version (I2: as the engine reported it)."""

    start: int
    end: int
    version: Version
    digest: Digest

    @property
    def key(self) -> VersionKey:
        return VersionKey(self.version, self.digest)


class HeldLease(NamedTuple):
    """A lease attempt the peer is still working on."""

    lease: LeaseId
    attempt: int


@dataclass(frozen=True, slots=True)
class SampleDelta:
    """New output tokens of one sample since the last progress message, their logprobs and spans."""

    sample: int
    tokens: bytes
    logprobs: bytes
    spans: tuple[VersionSpan, ...]


@dataclass(frozen=True, slots=True)
class LinkSample:
    """What this peer received over one link since the last report: payload bytes in `seconds` of transfer time."""

    peer: PeerId
    payload_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Backlog:
    """For so long since the last report this peer had more to send to that one than their link took."""

    peer: PeerId
    seconds: float


@dataclass(frozen=True, slots=True)
class StripeEdge:
    """This peer's place in one stripe's tree: its parent (None at the root) and its children."""

    stripe: StripeId
    weight: float
    parent: PeerId | None
    children: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class EdgePeer:
    """A peer that this one shares an edge with, fetches frames from or gives them to, and how their link comes about.

    dial: this peer dials `address`; otherwise it waits to be dialled. secret: known to the two ends only. pace: bytes/s
    that this peer sends to the other at most; None: as fast as it can.
    """

    peer: PeerId
    address: Address | None
    dial: bool
    secret: bytes
    pace: float | None = None


# --- peer -> coordinator -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of a connection.

    boot_id changes with every start of the daemon. slots: samples its engines run at once together (0 for relays).
    serving: the version all its engines serve, None when they serve nothing or differ. holding: versions that stand
    verified in its slots, the one that deltas can be made from last. forms: forms whose frames are all on its disk.
    served: the versions that wrote for `leases` and were served by all its engines. receive_only: it passes nothing on.
    uplink_limit: bytes/s that it sends to other peers at most, whatever a plan says. usd_per_h: what it costs, as its
    owner says; the run's operator may know better. dial_back_secret: whoever answers
    at `listen` proves to know it.
    """

    protocol: int
    run_id: RunId | None
    kind: PeerKind
    name: str
    boot_id: str
    slots: int
    listen: Address | None
    serving: VersionKey | None
    holding: tuple[VersionKey, ...]
    leases: tuple[HeldLease, ...]
    forms: tuple[FormId, ...]
    served: tuple[VersionKey, ...] = ()
    receive_only: bool = False
    uplink_limit: int | None = None
    dial_back_secret: bytes = b""
    usd_per_h: float | None = None


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Alive. running: samples now in the engines."""

    running: int


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The peer leaves on purpose; what it still holds may be given to others at once."""

    reason: str


@dataclass(frozen=True, slots=True)
class Leaving:
    """The peer will be taken away soon (a spot notice): it takes no more leases, and says Goodbye when it has none."""

    reason: str


@dataclass(frozen=True, slots=True)
class SegmentEncoded:
    """Seed only: segment number `segment` of the form is on its disk; `digest` is its table's."""

    form: FormId
    segment: SegmentId
    digest: Digest


@dataclass(frozen=True, slots=True)
class FormEncoded:
    """Seed only: all segments of the form are on its disk. wire_bytes: payload and tables."""

    form: FormId
    snapshot: Digest
    segments: int
    wire_bytes: int
    full_bytes: int
    encode_s: float


@dataclass(frozen=True, slots=True)
class EncodeFailed:
    """Seed only: this form will not come. lacks_base: for what it is a delta from is not here, and will not be."""

    form: FormId
    reason: str
    lacks_base: bool = False


@dataclass(frozen=True, slots=True)
class DeltasKept:
    """Seed only: the deltas that it can compose others of; after a Welcome, and whenever they change."""

    deltas: tuple[KeptDelta, ...]


@dataclass(frozen=True, slots=True)
class SegmentsWanted:
    """A newcomer asks for the digests of segments [start, ...) of a form; answered by one SegmentPage."""

    form: FormId
    start: SegmentId


@dataclass(frozen=True, slots=True)
class EdgeBroken:
    """The link to a parent or child of this plan is gone or stalled, after the peer's own attempts to mend it."""

    plan: PlanId
    generation: Generation
    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class FrameAccused:
    """`accused` sent a frame of this form whose digest is wrong."""

    form: FormId
    frame: FrameId
    accused: PeerId


@dataclass(frozen=True, slots=True)
class TransferReport:
    """Progress of the form that moves (about once a second while it does): frames verified so far, and links.

    backlogs: of the links that this peer sends over; without one it was never late, and its uplink not the limit.
    duplicates: payload frames that came although they were held.
    """

    form: FormId
    payload_bytes: int
    links: tuple[LinkSample, ...]
    sent_bytes: int
    backlogs: tuple[Backlog, ...] = ()
    duplicates: int = 0


@dataclass(frozen=True, slots=True)
class VersionVerified:
    """The form's snapshot stands verified in a slot of this worker (a relay peer: all its frames are verified)."""

    form: FormId
    version: Version
    digest: Digest


@dataclass(frozen=True, slots=True)
class ApplyFailed:
    """The form arrived but could not become a snapshot here (disk full, ...); the old version stays.

    lacks_base: because chunks that it is a delta from are not here; another form of the version would do.
    """

    form: FormId
    reason: str
    lacks_base: bool = False


@dataclass(frozen=True, slots=True)
class RefitDone:
    """Every engine of this worker now serves this version. pause_s: the longest time without generation.

    memory_ok: the weights were read back out of the engines' memory and are those of the snapshot; None: not checked.
    held_s: engines were held until now, since the version's first root or the refit before; 0: they were not.
    """

    version: Version
    digest: Digest
    pause_s: float
    memory_ok: bool | None
    held_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RefitFailed:
    """The refit did not happen; `serving` is what the engines serve now (None: nothing)."""

    version: Version
    digest: Digest
    serving: VersionKey | None
    reason: str


@dataclass(frozen=True, slots=True)
class LeaseProgress:
    """New tokens of a lease; renews it. At least every PROGRESS_S while the engine generates; may be empty.

    Of each sample the tokens since the last message, from its first one again after a Welcome, as far as the versions
    that wrote them are confirmed (see SampleFinished). If the lease ends unfinished, somebody else goes on from there.
    """

    lease: LeaseId
    attempt: int
    samples: tuple[SampleDelta, ...]


@dataclass(frozen=True, slots=True)
class SampleFinished:
    """One sample's whole output under this lease attempt. Sent until a SampleAnswered for it comes.

    Every version in its spans is confirmed: all engines served it, and RefitDone or Hello.served said so before.
    """

    lease: LeaseId
    attempt: int
    sample: int
    tokens: bytes
    logprobs: bytes
    spans: tuple[VersionSpan, ...]
    finish: Finish


@dataclass(frozen=True, slots=True)
class LeaseFailed:
    """The peer gives the lease back (engine fault, shutting down, no usable version)."""

    lease: LeaseId
    attempt: int
    reason: str


# --- coordinator -> peer -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Welcome:
    """The connection is accepted. keep / cancel answer Hello.leases. publish_seq: the newest ever published.

    exclusive: engines generate nothing while a version that they do not serve yet is on its way.
    """

    peer: PeerId
    run_id: RunId
    epoch: Epoch
    publish_seq: PublishSeq
    heartbeat_s: float
    keep: tuple[HeldLease, ...]
    cancel: tuple[HeldLease, ...]
    exclusive: bool = False


@dataclass(frozen=True, slots=True)
class Refused:
    """The connection is refused and closes. permanent: trying again with the same credential is of no use."""

    reason: RefusalReason
    detail: str
    permanent: bool


@dataclass(frozen=True, slots=True)
class DialledBack:
    """The peer was dialled where its hello says that it listens. fault: why it did not answer; empty: it did."""

    fault: str


@dataclass(frozen=True, slots=True)
class EncodeVersion:
    """To the seed: encode the snapshot in directory `path` (relative to the run directory) as this form.

    facts: the form's `forms.FormFacts`, encoded; kind, version and frame_bytes say the same. base_path: the directory
    of the base's snapshot, for delta forms. via: the snapshots between the base and this one, for composed forms.
    aside: for a few peers; other forms do not wait for it.
    """

    form: FormId
    kind: FormKind
    version: Version
    digest: Digest
    path: str
    frame_bytes: int
    facts: bytes
    base_path: str | None
    aside: bool = False
    via: tuple[Digest, ...] = ()


@dataclass(frozen=True, slots=True)
class ForgetForm:
    """This form is of no further use; its frames may be deleted."""

    form: FormId


@dataclass(frozen=True, slots=True)
class SignedRoot:
    """`root`: the signed bytes of a `weights/signed_index.Root`; `signature`: Ed25519 over them by the run's key."""

    root: bytes
    signature: bytes


@dataclass(frozen=True, slots=True)
class SegmentPage:
    """Digests of segments start, start + 1, ... of a form, to be checked against a signed running digest."""

    form: FormId
    start: SegmentId
    digests: tuple[Digest, ...]


@dataclass(frozen=True, slots=True)
class PlanEdges:
    """This peer's part of a plan: its place in each stripe, and the peers it shares an edge with.

    Replaces the part of an earlier generation; edges that did not change go on undisturbed. sources: those of the peers
    that hold the whole form, for this newcomer to fetch what it misses from. blind: nothing is known of any peer.
    """

    form: FormId
    plan: PlanId
    generation: Generation
    stripes: tuple[StripeEdge, ...]
    peers: tuple[EdgePeer, ...]
    sources: tuple[PeerId, ...] = ()
    blind: bool = False


@dataclass(frozen=True, slots=True)
class VersionsRevoked:
    """A new epoch revoked these versions: serve none of them, drop leases that used them."""

    epoch: Epoch
    versions: tuple[VersionKey, ...]


@dataclass(frozen=True, slots=True)
class LeaseGranted:
    """One generation call: the samples with these indices (within their group) of one prompt.

    A prompt may end with output of an earlier attempt; then max_new_tokens is reduced by it, and the result is what
    comes after it.
    oldest: the oldest version that may write a token. silence_s: without a LeaseProgress or SampleFinished for so
    long the lease goes to somebody else. report_s: progress is wanted so often, for somebody reads along. rng_seed: of
    the first of the samples; None: the engine's choice.
    """

    lease: LeaseId
    attempt: int
    group: GroupId
    prompt: bytes
    samples: tuple[int, ...]
    max_new_tokens: int
    temperature: float
    top_p: float
    stop_token_ids: tuple[int, ...]
    oldest: Version
    silence_s: float
    report_s: float = PROGRESS_S
    rng_seed: int | None = None


@dataclass(frozen=True, slots=True)
class LeaseCancelled:
    """Stop working on this attempt; nothing more of it is wanted."""

    lease: LeaseId
    attempt: int


@dataclass(frozen=True, slots=True)
class SampleAnswered:
    """A SampleFinished is durable (or an identical repeat), or refused; either way it need not be sent again."""

    lease: LeaseId
    attempt: int
    sample: int
    accepted: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Take no more leases, finish what is held; the peer may then say Goodbye."""

    reason: str


ToCoordinator = (
    Hello | Heartbeat | Leaving | Goodbye | SegmentEncoded | FormEncoded | EncodeFailed | DeltasKept | SegmentsWanted
    | EdgeBroken | FrameAccused | TransferReport | VersionVerified | ApplyFailed | RefitDone | RefitFailed
    | LeaseProgress | SampleFinished | LeaseFailed
)  # fmt: skip
ToPeer = (
    Welcome | Refused | EncodeVersion | ForgetForm | SignedRoot | SegmentPage | PlanEdges | VersionsRevoked
    | LeaseGranted | LeaseCancelled | SampleAnswered | Drain | DialledBack
)  # fmt: skip

# A tag is part of the protocol: it stays when a class is renamed.
TO_COORDINATOR = Codec(
    {
        "Hello": Hello,
        "Heartbeat": Heartbeat,
        "Leaving": Leaving,
        "Goodbye": Goodbye,
        "SegmentEncoded": SegmentEncoded,
        "FormEncoded": FormEncoded,
        "EncodeFailed": EncodeFailed,
        "DeltasKept": DeltasKept,
        "SegmentsWanted": SegmentsWanted,
        "EdgeBroken": EdgeBroken,
        "FrameAccused": FrameAccused,
        "TransferReport": TransferReport,
        "VersionVerified": VersionVerified,
        "ApplyFailed": ApplyFailed,
        "RefitDone": RefitDone,
        "RefitFailed": RefitFailed,
        "LeaseProgress": LeaseProgress,
        "SampleFinished": SampleFinished,
        "LeaseFailed": LeaseFailed,
    }
)
TO_PEER = Codec(
    {
        "Welcome": Welcome,
        "Refused": Refused,
        "EncodeVersion": EncodeVersion,
        "ForgetForm": ForgetForm,
        "SignedRoot": SignedRoot,
        "SegmentPage": SegmentPage,
        "PlanEdges": PlanEdges,
        "VersionsRevoked": VersionsRevoked,
        "LeaseGranted": LeaseGranted,
        "LeaseCancelled": LeaseCancelled,
        "SampleAnswered": SampleAnswered,
        "Drain": Drain,
        "DialledBack": DialledBack,
    }
)
