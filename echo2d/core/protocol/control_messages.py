"""The control link: every message between the coordinator and a peer.

The docstrings here are the protocol text. Each peer opens one WebSocket to the coordinator, and
each message is one binary frame (`codec.Codec`, at most 4 MiB). The first message is the peer's
`Hello`; the coordinator answers with `Welcome` or `Refused` before anything else.

    peer -> coordinator                                     coordinator -> peer
    Hello                                                   Welcome | Refused
    Heartbeat                        every heartbeat_s
    SegmentEncoded, FormEncoded, EncodeFailed,
    DeltasKept                              (seed only)     EncodeVersion, ForgetForm (to the seed)
    SegmentsWanted                                          SignedRoot, SegmentPage
    EdgeBroken, FrameAccused, TransferReport                PlanEdges
    VersionVerified, ApplyFailed, RefitDone, RefitFailed    VersionsRevoked
    LeaseProgress, SampleFinished, LeaseFailed              LeaseGranted, LeaseCancelled,
                                                            SampleAnswered
    Leaving, Goodbye                                        Drain, DialledBack
    AnswersScored, ScoringFailed     (auditors only)        ScoreAnswers (to auditors)

Tokens travel as little-endian int32 and logprobs as little-endian float32, both as bytes
(`trajectory.pack_tokens`). Durations are seconds left or seconds measured, never clock values.
A version is always named together with its snapshot's digest.
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
from echo2d.core.protocol.builds import OURS, Build
from echo2d.core.protocol.columns import Columns
from echo2d.core.protocol.evidence import Evidence
from echo2d.core.protocol.sampling import WHOLE, Sampling
from echo2d.core.weights.kept_deltas import FormKind, KeptDelta

PROGRESS_S = 2.0  # a worker reports on every lease at least this often

PeerKind = Literal["worker", "relay", "seed", "auditor"]
Finish = Literal["stop", "length", "context", "stop_string"]  # see `answer_end`
RefusalReason = Literal[
    "protocol", "build", "run", "credential", "revoked", "convicted", "superseded", "flapping",
    "busy",
]  # fmt: skip
# By which engine's rule a seed decides a token; "none": engines draw as they like.
SeedReplay = Literal["torch", "sglang", "none"]


# --- parts ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Address:
    """Where other peers can connect to a peer."""

    host: str
    port: int


class VersionKey(NamedTuple):
    """A published version: its number, and the digest of its exact bytes."""

    version: Version
    digest: Digest


class VersionSpan(NamedTuple):
    """This version wrote output tokens [start, end) of a sample, as the engine reported (I2)."""

    start: int
    end: int
    version: Version
    digest: Digest

    @property
    def key(self) -> VersionKey:
        return VersionKey(self.version, self.digest)


class HeldLease(NamedTuple):
    """A lease attempt that the peer is still working on."""

    lease: LeaseId
    attempt: int


@dataclass(frozen=True, slots=True)
class SampleDelta:
    """Output tokens of one sample since the last progress message, with logprobs, spans and columns."""

    sample: int
    tokens: bytes
    logprobs: bytes
    spans: tuple[VersionSpan, ...]
    columns: Columns = ()


@dataclass(frozen=True, slots=True)
class LinkSample:
    """What this peer received from `peer` since the last report.

    payload_bytes arrived in `seconds` of transfer time.
    """

    peer: PeerId
    payload_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StripeEdge:
    """This peer's place in the tree of one stripe: its parent (None at the root) and children.

    spare: above 0, the root binds to this stripe what no ordinary one takes, at most this share of
    the form's bytes. weight: above 0, the root gives it that part of the bytes as long as its relays
    keep up; 0: what they can pass on.
    """

    stripe: StripeId
    parent: PeerId | None
    children: tuple[PeerId, ...]
    spare: float = 0.0
    weight: float = 0.0


@dataclass(frozen=True, slots=True)
class EdgePeer:
    """Another peer with which this one exchanges frames, and how they connect.

    dial: this peer connects to `address`; otherwise it waits for the other to connect. secret:
    known to these two peers only.
    """

    peer: PeerId
    address: Address | None
    dial: bool
    secret: bytes


@dataclass(frozen=True, slots=True)
class AnswerToScore:
    """Consecutive tokens of one answer that one worker wrote with one version.

    prompt: everything before them. written: so many of its tokens the sample's versions wrote; its
    seed goes on behind them. logprobs: as the worker reported them. seed: the sample's; None: it is
    not replayed. sampling: as the answer was drawn.
    """

    prompt: bytes
    tokens: bytes
    logprobs: bytes
    written: int
    seed: int | None
    sampling: Sampling = WHOLE


# --- peer -> coordinator --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of a connection. Its first fields, to `name`, never change (`builds`).

    build: of the peer's program. boot_id: changes with every start of the daemon. slots: samples
    that all its engines together run at once (0 for relay peers). listen: where other peers can
    connect to it; None: nowhere. serving: the version that all its engines serve; None: they serve
    nothing, or different versions. holding: the versions that are verified in its slots; the one
    that deltas can be made from comes last. leases: the attempts that it still works on. forms: the
    forms of which it has every frame on disk. served: the versions that wrote tokens for `leases` and that all its
    engines served. receive_only: it passes nothing on. uplink_limit: most bytes/s that it sends to
    other peers, whatever a plan says. usd_per_h: its price as its owner states it; a price in the
    run's config wins. dial_back_secret: the peer that answers at `listen` must prove that it knows
    this. scores: its engine can score answers that others wrote. quantization: what its engines
    quantize weights to, such as "int8"; empty: they do not. received_bytes, sent_bytes: as in Heartbeat.
    """

    build: Build
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
    scores: bool = False
    quantization: str = ""
    received_bytes: int = 0
    sent_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The peer is alive.

    running: samples that are in its engines now. disk_free: bytes that new versions may take on its
    disk, with those that older versions give up for them; None: not said. received_bytes, sent_bytes:
    payload of versions over all peer links since its program started; 0: nothing, or not said.
    """

    running: int
    disk_free: int | None = None
    received_bytes: int = 0
    sent_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The peer leaves on purpose. The leases that it holds may go to other workers at once."""

    reason: str


@dataclass(frozen=True, slots=True)
class Leaving:
    """The peer will lose its machine soon (a spot notice).

    It takes no more leases, and sends Goodbye when it has none left.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class SegmentEncoded:
    """Seed only: this segment of the form is on its disk. digest: of the segment's table."""

    form: FormId
    segment: SegmentId
    digest: Digest


@dataclass(frozen=True, slots=True)
class FormEncoded:
    """Seed only: all segments of the form are on its disk.

    wire_bytes: payload and tables of this form. full_bytes: of the full form. encode_s: seconds
    that encoding took.
    """

    form: FormId
    snapshot: Digest
    segments: int
    wire_bytes: int
    full_bytes: int
    encode_s: float


@dataclass(frozen=True, slots=True)
class EncodeFailed:
    """Seed only: the seed cannot make this form.

    lacks_base: because the seed does not have the version that the form is a delta from. differs:
    because the version's files are not what was published, which the seed finds when it has read
    them all.
    """

    form: FormId
    reason: str
    lacks_base: bool = False
    differs: bool = False


@dataclass(frozen=True, slots=True)
class DeltasKept:
    """Seed only: the deltas from which it can compose other deltas.

    Sent after a Welcome, and again whenever they change.
    """

    deltas: tuple[KeptDelta, ...]


@dataclass(frozen=True, slots=True)
class SegmentsWanted:
    """Asks for the digests of the segments from `start` on; one SegmentPage is the answer.

    A peer that joins in the middle of a form needs them.
    """

    form: FormId
    start: SegmentId


@dataclass(frozen=True, slots=True)
class EdgeBroken:
    """The link to a parent or child in this plan is lost or stalled.

    The peer has tried to restore it before it sends this.
    """

    plan: PlanId
    generation: Generation
    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class FrameAccused:
    """The peer `accused` sent a frame of this form whose digest is wrong."""

    form: FormId
    frame: FrameId
    accused: PeerId


@dataclass(frozen=True, slots=True)
class TransferReport:
    """Progress of a form while its frames arrive, about once a second.

    payload_bytes: verified so far. links: what arrived over each link since the last report.
    busy_s: since the last report, for so long its uplink had something to send.
    duplicates: payload frames that arrived although the peer had them already.
    """

    form: FormId
    payload_bytes: int
    links: tuple[LinkSample, ...]
    sent_bytes: int
    busy_s: float = 0.0
    duplicates: int = 0


@dataclass(frozen=True, slots=True)
class VersionVerified:
    """The form's snapshot is verified in a slot of this worker.

    A relay peer sends this when it has verified all frames of the form.
    """

    form: FormId
    version: Version
    digest: Digest


@dataclass(frozen=True, slots=True)
class ApplyFailed:
    """The form arrived but could not become a snapshot here (disk full, ...). The old version
    stays.

    lacks_base: because the worker lacks chunks that the form is a delta from; another form of the
    version would do.
    """

    form: FormId
    reason: str
    lacks_base: bool = False


@dataclass(frozen=True, slots=True)
class RefitDone:
    """Every engine of this worker now serves this version.

    pause_s: the longest time in which one of its engines generated nothing. memory_ok: the weights
    were read back from the engines' memory and equal the snapshot's; None: not checked. held_s: for
    how long the engines were held until now, since the version's first root or the refit before it;
    0: they were not held. recomputed_tokens: prompt and output of the running samples whose KV
    caches were dropped, of all engines together. recompute_s: the longest time that one of its
    engines spends on computing them again, besides pause_s; None: it does not know.
    """

    version: Version
    digest: Digest
    pause_s: float
    memory_ok: bool | None
    held_s: float = 0.0
    recomputed_tokens: int = 0
    recompute_s: float | None = None


@dataclass(frozen=True, slots=True)
class RefitFailed:
    """The refit failed. serving: what the engines serve now; None: nothing."""

    version: Version
    digest: Digest
    serving: VersionKey | None
    reason: str


@dataclass(frozen=True, slots=True)
class LeaseProgress:
    """New tokens of a lease. It renews the lease, and may be empty.

    A worker sends it at least every PROGRESS_S while the engine generates. It holds the tokens of
    each sample since the last message (after a Welcome: since the sample's first token), as far as
    the versions that wrote them are confirmed (see SampleFinished). If the lease ends before a
    sample does, another worker continues from these tokens.
    """

    lease: LeaseId
    attempt: int
    samples: tuple[SampleDelta, ...]


@dataclass(frozen=True, slots=True)
class SampleFinished:
    """The whole output of one sample under this lease attempt. Repeated until it is answered.

    Every version in its spans is confirmed: all engines of the worker served it, and an earlier
    RefitDone or Hello.served said so. The answer is a SampleAnswered.
    """

    lease: LeaseId
    attempt: int
    sample: int
    tokens: bytes
    logprobs: bytes
    spans: tuple[VersionSpan, ...]
    finish: Finish
    columns: Columns = ()


@dataclass(frozen=True, slots=True)
class LeaseFailed:
    """The peer gives the lease back: an engine fault, a shutdown, or no usable version."""

    lease: LeaseId
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class AnswersScored:
    """Answers a ScoreAnswers: what was found about each answer, in the same order.

    scoring_s, loading_s: seconds that scoring, and loading the version, took.
    """

    order: int
    found: tuple[Evidence, ...]
    scoring_s: float
    loading_s: float


@dataclass(frozen=True, slots=True)
class ScoringFailed:
    """Answers a ScoreAnswers that cannot be done: the version is not here, or does not fit."""

    order: int
    reason: str


# --- coordinator -> peer --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Welcome:
    """The connection is accepted.

    keep, cancel: which of Hello.leases to continue and which to stop. publish_seq: of the newest
    version ever published. exclusive: the engines generate nothing while a version that they do not
    serve yet is on its way. build: of the coordinator's program.
    """

    peer: PeerId
    run_id: RunId
    epoch: Epoch
    publish_seq: PublishSeq
    heartbeat_s: float
    keep: tuple[HeldLease, ...]
    cancel: tuple[HeldLease, ...]
    exclusive: bool = False
    build: Build = OURS


@dataclass(frozen=True, slots=True)
class Refused:
    """The connection is refused and closes.

    permanent: retrying with this credential is useless. retry_s: otherwise, the peer may come again
    after so many seconds; 0: as its own back-off says. These four fields never change (`builds`).
    """

    reason: RefusalReason
    detail: str
    permanent: bool
    retry_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DialledBack:
    """The coordinator tried to connect to Hello.listen. fault: why it failed; empty: it worked."""

    fault: str


@dataclass(frozen=True, slots=True)
class EncodeVersion:
    """To the seed: encode the snapshot in directory `path` as this form.

    path: relative to the run directory. facts: the form's encoded `FormFacts`; kind, version and
    frame_bytes repeat parts of it. base_path: for a delta form, the directory of the base's
    snapshot. via: for a composed delta, the snapshots between the base and this one. aside: only a
    few peers need the form; other forms do not wait for it.
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
    """The form is no longer needed; the seed may delete its frames."""

    form: FormId


@dataclass(frozen=True, slots=True)
class SignedRoot:
    """A form's root. root: the bytes of a `weights/signed_index.Root`.

    signature: Ed25519 over these bytes, by the run's key.
    """

    root: bytes
    signature: bytes


@dataclass(frozen=True, slots=True)
class SegmentPage:
    """Digests of a form's segments start, start + 1 and so on.

    The peer checks them against the running digest in a signed root.
    """

    form: FormId
    start: SegmentId
    digests: tuple[Digest, ...]


@dataclass(frozen=True, slots=True)
class PlanEdges:
    """This peer's part of a plan: its place in each stripe, and the peers to which it connects.

    It replaces the part of an earlier generation; edges that did not change continue undisturbed.
    sources: the peers among these that hold the whole form; this newcomer fetches what it missed
    from them.
    """

    form: FormId
    plan: PlanId
    generation: Generation
    stripes: tuple[StripeEdge, ...]
    peers: tuple[EdgePeer, ...]
    sources: tuple[PeerId, ...] = ()


@dataclass(frozen=True, slots=True)
class VersionsRevoked:
    """A new epoch revoked these versions: serve none of them, and drop leases that used them."""

    epoch: Epoch
    versions: tuple[VersionKey, ...]


@dataclass(frozen=True, slots=True)
class LeaseGranted:
    """One generation call: samples of one prompt.

    samples: their indices within the group. written: so many tokens at the end of the prompt are
    output of an earlier attempt; max_new_tokens is already reduced by them, and the result is only
    what comes after them. oldest: the oldest version that may write a token. silence_s: without a
    LeaseProgress or SampleFinished for this long, the lease goes to another worker. report_s: how
    often to report progress; shorter when a client reads the tokens as they come. rng_seeds: one
    for each sample (see `seeds`); empty: the engine chooses. hold_s: above 0, version `oldest` alone
    may write a token, and the worker waits so long at most with loading a newer one, also for the answers to its
    results: another turn may follow. stop_strings:
    an answer ends with the token that completes one of them in its text. earlier: tokens that
    the sample's versions wrote in earlier turns, most of them in the prompt; its seed goes on behind them.
    """

    lease: LeaseId
    attempt: int
    group: GroupId
    prompt: bytes
    samples: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling
    stop_token_ids: tuple[int, ...]
    oldest: Version
    silence_s: float
    report_s: float = PROGRESS_S
    rng_seeds: tuple[int, ...] = ()
    written: int = 0
    hold_s: float = 0.0
    stop_strings: tuple[str, ...] = ()
    earlier: int = 0


@dataclass(frozen=True, slots=True)
class LeaseCancelled:
    """Stop working on this attempt; its results are no longer wanted."""

    lease: LeaseId
    attempt: int


@dataclass(frozen=True, slots=True)
class SampleAnswered:
    """The answer to a SampleFinished, which need not be sent again.

    accepted: the sample is durable, also if it was an identical repeat; otherwise it was refused.
    """

    lease: LeaseId
    attempt: int
    sample: int
    accepted: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Take no more leases and finish those held. Then the peer may send Goodbye."""

    reason: str


@dataclass(frozen=True, slots=True)
class ScoreAnswers:
    """To an auditor: score these answers under this version, with one prefill each.

    path: of the version's copy, relative to the run directory; a worker scores with the version
    that it serves.
    """

    order: int
    version: Version
    digest: Digest
    path: str
    replay: SeedReplay
    answers: tuple[AnswerToScore, ...]

    @property
    def key(self) -> VersionKey:
        return VersionKey(self.version, self.digest)


ToCoordinator = (
    Hello | Heartbeat | Leaving | Goodbye | SegmentEncoded | FormEncoded | EncodeFailed
    | DeltasKept | SegmentsWanted | EdgeBroken | FrameAccused | TransferReport | VersionVerified
    | ApplyFailed | RefitDone | RefitFailed | LeaseProgress | SampleFinished | LeaseFailed
    | AnswersScored | ScoringFailed
)  # fmt: skip
ToPeer = (
    Welcome | Refused | EncodeVersion | ForgetForm | SignedRoot | SegmentPage | PlanEdges
    | VersionsRevoked | LeaseGranted | LeaseCancelled | SampleAnswered | Drain | DialledBack
    | ScoreAnswers
)  # fmt: skip

# The tags are part of the protocol: a tag stays when its class is renamed.
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
        "AnswersScored": AnswersScored,
        "ScoringFailed": ScoringFailed,
    },
    # They carry tokens, or one entry for each lease, peer, segment or version.
    large=(
        "Hello",
        "DeltasKept",
        "TransferReport",
        "LeaseProgress",
        "SampleFinished",
    ),
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
        "ScoreAnswers": ScoreAnswers,
    }
)
