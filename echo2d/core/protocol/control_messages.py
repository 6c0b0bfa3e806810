"""The control link: every message between the coordinator and a peer.

The docstrings and the comments beside the fields are the protocol text. Each peer opens one WebSocket
to the coordinator, and each message is one binary frame (`codec.Codec`, at most 4 MiB). The first
message is the peer's `Hello`; the coordinator answers with `Welcome` or `Refused` before anything
else.

    peer -> coordinator                                     coordinator -> peer
    Hello                                                   Welcome | Refused
    Heartbeat                        every heartbeat_s
    SegmentEncoded, FormEncoded, EncodeFailed,
    DeltasKept                              (seed only)     EncodeVersion, ForgetForm (to the seed)
    SegmentsWanted                                          SignedRoot, SegmentPage
    EdgeBroken, FrameAccused, TransferReport                PlanEdges
    VersionVerified, ApplyFailed, RefitDone, RefitFailed    VersionsRevoked, HeldVersions
    LeaseProgress, SampleFinished, LeaseFailed              LeaseGranted, LeaseCancelled,
                                                            SampleAnswered
    Leaving, Goodbye                                        Drain, DialledBack
    AnswersScored, ScoringFailed     (auditors only)        ScoreAnswers (to auditors)
    PromptRead                (trusted workers only)        ReadPrompt (to trusted workers)

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
# The engine whose rule turns a seed into tokens; "none": each engine draws by its own rule.
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
    """This peer's place in the tree of one stripe: its parent (None at the root) and children."""

    stripe: StripeId
    parent: PeerId | None
    children: tuple[PeerId, ...]
    # Above 0: this is a spare stripe. The root binds to it what no ordinary stripe takes, at most this share of the
    # form's bytes.
    spare: float = 0.0
    # Above 0: the root gives the stripe this part of the bytes as long as its relays keep up; 0: the root gives the
    # stripe what its relays can pass on.
    weight: float = 0.0


@dataclass(frozen=True, slots=True)
class EdgePeer:
    """Another peer with which this one exchanges frames, and how they connect."""

    peer: PeerId
    address: Address | None
    # Whether this peer connects to `address`; otherwise it waits for the other to connect.
    dial: bool
    secret: bytes  # known to these two peers only


@dataclass(frozen=True, slots=True)
class AnswerToScore:
    """Consecutive tokens of one answer that one worker wrote with one version."""

    prompt: bytes  # everything before these tokens
    tokens: bytes
    logprobs: bytes  # as the worker reported them
    # How many of the prompt's tokens engines wrote for this sample; its seed continues after them.
    written: int
    seed: int | None  # the sample's; None: it is not replayed
    sampling: Sampling = WHOLE  # how the answer was drawn
    columns: Columns = ()  # of the tokens, as the worker reported them


# --- peer -> coordinator --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of a connection. Its first fields, to `name`, never change (`builds`)."""

    build: Build  # of the peer's program
    run_id: RunId | None
    kind: PeerKind
    name: str
    boot_id: str  # changes with every start of the daemon
    # Samples that all its engines together run at once (0 for relay peers).
    slots: int
    # The address at which other peers can connect to it; None: nowhere.
    listen: Address | None
    # The version that all its engines serve; None: they serve nothing, or different versions.
    serving: VersionKey | None
    # The versions that are verified in its slots; the version from which deltas can be made comes last.
    holding: tuple[VersionKey, ...]
    leases: tuple[HeldLease, ...]  # the attempts that it still works on
    # The forms of which it has every frame on disk.
    forms: tuple[FormId, ...]
    # The versions that wrote tokens for `leases` and that all its engines served.
    served: tuple[VersionKey, ...] = ()
    receive_only: bool = False  # whether it passes nothing on
    # The most bytes/s that it sends to other peers, whatever a plan says.
    uplink_limit: int | None = None
    # The peer that answers at `listen` must prove that it knows this.
    dial_back_secret: bytes = b""
    # Its price as its owner states it; a price in the run's config takes precedence.
    usd_per_h: float | None = None
    # Whether its engine can score answers that others wrote.
    scores: bool = False
    # The format to which its engines quantize weights, such as "int8"; empty: they do not.
    quantization: str = ""
    # As in Heartbeat.
    received_bytes: int = 0
    sent_bytes: int = 0
    # The versions that all its engines hold (see HeldVersions), `serving` included.
    held: tuple[VersionKey, ...] = ()


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The peer is alive."""

    running: int  # samples that are in its engines now
    # How many bytes of its disk new versions may take, including the bytes that older versions would free for them;
    # None: not reported.
    disk_free: int | None = None
    # Payload bytes of versions that it received and sent over all peer links since its program started; 0: none, or not
    # reported.
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
    """Seed only: this segment of the form is on its disk."""

    form: FormId
    segment: SegmentId
    digest: Digest  # of the segment's table


@dataclass(frozen=True, slots=True)
class FormEncoded:
    """Seed only: all segments of the form are on its disk."""

    form: FormId
    snapshot: Digest
    segments: int
    wire_bytes: int  # payload and tables of this form
    full_bytes: int  # of the full form
    encode_s: float  # seconds that encoding took


@dataclass(frozen=True, slots=True)
class EncodeFailed:
    """Seed only: the seed cannot make this form."""

    form: FormId
    reason: str
    # Whether the reason is that the seed does not have the version that the form is a delta from.
    lacks_base: bool = False
    # Whether the reason is that the version's files are not the published ones. The seed notices this after it has read
    # all of them.
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

    The peer sends this after it tried to restore the link.
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
    """Progress of a form while its frames arrive, about once a second."""

    form: FormId
    payload_bytes: int  # verified so far
    # What arrived over each link since the last report.
    links: tuple[LinkSample, ...]
    sent_bytes: int
    # How many seconds its uplink had something to send since the last report.
    busy_s: float = 0.0
    # Payload frames that arrived although the peer had them already.
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
    """The form arrived but could not become a snapshot here (disk full, ...). The old version stays."""

    form: FormId
    reason: str
    # Whether the reason is that the worker lacks chunks that the form is a delta from; another form
    # of the version would do.
    lacks_base: bool = False


@dataclass(frozen=True, slots=True)
class RefitDone:
    """Every engine of this worker now serves this version."""

    version: Version
    digest: Digest
    # The longest time in which one of its engines generated nothing.
    pause_s: float
    # Whether the weights, read back from the engines' memory, equal the snapshot's; None: this was
    # not checked.
    memory_ok: bool | None
    # How long the engines have been held, counted from the version's first root or from the previous refit; 0: they
    # were not held.
    held_s: float = 0.0
    # The tokens (prompt and output) of the running samples whose KV caches were dropped, in all engines together.
    recomputed_tokens: int = 0
    # The longest time that one engine spends on recomputing these tokens, in addition to pause_s; None: not known.
    recompute_s: float | None = None
    # The versions that every engine holds now (see HeldVersions), this one included.
    held: tuple[VersionKey, ...] = ()
    # How many versions the engines hold at most, if these are fewer than HeldVersions.most.
    held_max: int | None = None


@dataclass(frozen=True, slots=True)
class RefitFailed:
    """The refit failed."""

    version: Version
    digest: Digest
    serving: VersionKey | None  # what the engines serve now; None: nothing
    reason: str
    # As in RefitDone; empty if nothing is served.
    held: tuple[VersionKey, ...] = ()


@dataclass(frozen=True, slots=True)
class LeaseProgress:
    """Reports the new tokens of a lease, if there are any, and renews the lease.

    A worker sends it at least every PROGRESS_S while the engine generates. For each sample it has the tokens since the
    last message (after a Welcome: since the sample's first token), up to the first token whose version is not confirmed
    (see SampleFinished). If the lease ends before a sample does, another worker continues the sample from these tokens.
    """

    lease: LeaseId
    attempt: int
    samples: tuple[SampleDelta, ...]


@dataclass(frozen=True, slots=True)
class SampleFinished:
    """The whole output of one sample under this lease attempt. It is repeated until it is answered.

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
    """Answers a ScoreAnswers: the evidence about each answer, in the same order."""

    order: int
    found: tuple[Evidence, ...]
    scoring_s: float  # seconds that scoring took
    loading_s: float  # seconds that loading the version took


@dataclass(frozen=True, slots=True)
class ScoringFailed:
    """Answers a ScoreAnswers that this auditor cannot do: it does not have the version, or no room for it."""

    order: int
    reason: str


@dataclass(frozen=True, slots=True)
class PromptRead:
    """Answers a ReadPrompt."""

    order: int
    scores: bytes  # what the learner would answer
    fault: str = ""  # why the prompt was not read; empty: it was


# --- coordinator -> peer --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Welcome:
    """The connection is accepted."""

    peer: PeerId
    run_id: RunId
    epoch: Epoch
    publish_seq: PublishSeq  # of the newest version ever published
    heartbeat_s: float
    keep: tuple[HeldLease, ...]  # the leases of the Hello to continue
    cancel: tuple[HeldLease, ...]  # the leases of the Hello to stop
    # Whether the engines must generate nothing while a version that they do not serve yet is on its way.
    exclusive: bool = False
    # How many versions behind the newest a token may be that the run still trains on.
    staleness_max: int = 0
    build: Build = OURS  # of the coordinator's program


@dataclass(frozen=True, slots=True)
class Refused:
    """The connection is refused and closes. The four fields never change (`builds`)."""

    reason: RefusalReason
    detail: str
    permanent: bool  # whether retrying with this credential is useless
    # If not permanent: the peer may connect again after this many seconds; 0: after its own back-off.
    retry_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DialledBack:
    """The coordinator has tried to connect to Hello.listen."""

    fault: str  # why it failed; empty: it worked


@dataclass(frozen=True, slots=True)
class EncodeVersion:
    """To the seed: encode the snapshot in directory `path` as this form."""

    form: FormId
    kind: FormKind
    version: Version
    digest: Digest
    path: str  # relative to the run directory
    frame_bytes: int
    # The form's encoded `FormFacts`; kind, version and frame_bytes repeat parts of them.
    facts: bytes
    # For a delta form, the directory of the base's snapshot.
    base_path: str | None
    # Whether only a few peers need the form, so that other forms do not wait for it.
    aside: bool = False
    # For a composed delta, the snapshots between the base and this one.
    via: tuple[Digest, ...] = ()


@dataclass(frozen=True, slots=True)
class ForgetForm:
    """The form is no longer needed; the seed may delete its frames."""

    form: FormId


@dataclass(frozen=True, slots=True)
class SignedRoot:
    """A form's root."""

    root: bytes  # the bytes of a `weights/signed_index.Root`
    signature: bytes  # Ed25519 over these bytes, by the run's key


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

    It replaces this peer's part of an earlier generation. Streams on edges that did not change continue.
    """

    form: FormId
    plan: PlanId
    generation: Generation
    stripes: tuple[StripeEdge, ...]
    peers: tuple[EdgePeer, ...]
    # Those of `peers` that hold the whole form. A newcomer fetches from them what it has missed.
    sources: tuple[PeerId, ...] = ()


@dataclass(frozen=True, slots=True)
class VersionsRevoked:
    """A new epoch revoked these versions: serve none of them, and drop leases that used them."""

    epoch: Epoch
    versions: tuple[VersionKey, ...]


@dataclass(frozen=True, slots=True)
class HeldVersions:
    """Which versions the engines hold from the next refit on, beside the one that they load.

    A held version answers the leases that name it, although another one is served. Engines hold adapters only; a whole
    model is held alone. The message follows each Welcome, and comes again whenever the versions change, before the
    roots of the next version. It is sent only in runs in which engines hold several versions. A version that an engine
    does not hold when the refit begins is not loaded for this.
    """

    # Engines hold at most this many, the served one included; the number never changes within a run.
    most: int
    # If there is no room for all of them, the first ones are held.
    versions: tuple[VersionKey, ...]


@dataclass(frozen=True, slots=True)
class LeaseGranted:
    """One generation call: samples of one prompt."""

    lease: LeaseId
    attempt: int
    group: GroupId
    prompt: bytes
    samples: tuple[int, ...]  # their indices within the group
    max_new_tokens: int
    sampling: Sampling
    stop_token_ids: tuple[int, ...]
    oldest: Version  # the oldest version that may write a token
    # Without a LeaseProgress or SampleFinished for this long, the lease goes to another worker.
    silence_s: float
    # How often to report progress; shorter when a client reads the tokens as they come.
    report_s: float = PROGRESS_S
    # One seed for each sample (see `seeds`); empty: the engine chooses.
    rng_seeds: tuple[int, ...] = ()
    # This many tokens at the end of the prompt are output of an earlier attempt. max_new_tokens is
    # already reduced by them, and the result has only what comes after them.
    written: int = 0
    # Above 0: only version `oldest` may write a token. Until the results of the lease are answered, the worker loads no
    # newer version, because another turn may follow; but it waits at most this many seconds.
    hold_s: float = 0.0
    # An answer ends with the token that completes one of these in its text.
    stop_strings: tuple[str, ...] = ()
    # How many tokens of the sample engines wrote in earlier turns; most of these are in the prompt. The sample's seed
    # continues after them.
    earlier: int = 0
    columns: tuple[str, ...] = ()  # the columns that the run keeps
    # Exactly this version writes all tokens, whatever the worker serves; a worker that does not hold it gives the lease
    # back. None: the version that the worker serves writes them.
    version: VersionKey | None = None


@dataclass(frozen=True, slots=True)
class LeaseCancelled:
    """Stop working on this attempt; its results are no longer wanted."""

    lease: LeaseId
    attempt: int


@dataclass(frozen=True, slots=True)
class SampleAnswered:
    """The answer to a SampleFinished, which need not be sent again."""

    lease: LeaseId
    attempt: int
    sample: int
    # True: the sample is durable, also if this was an identical repeat. False: it was refused.
    accepted: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Take no more leases and finish those held. Then the peer may send Goodbye."""

    reason: str


@dataclass(frozen=True, slots=True)
class ScoreAnswers:
    """To an auditor: score these answers under this version, with one prefill each."""

    order: int
    version: Version
    digest: Digest
    # Where the version's copy is, relative to the run directory. A worker needs no copy, because it scores with a
    # version that it holds.
    path: str
    replay: SeedReplay
    answers: tuple[AnswerToScore, ...]

    @property
    def key(self) -> VersionKey:
        return VersionKey(self.version, self.digest)


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    """To a trusted worker: find out what a client of the Tinker API asks of a prompt, under a version that it holds."""

    order: int
    version: Version
    digest: Digest
    call: bytes  # the body of the learner's order "score"


ToCoordinator = (
    Hello | Heartbeat | Leaving | Goodbye | SegmentEncoded | FormEncoded | EncodeFailed
    | DeltasKept | SegmentsWanted | EdgeBroken | FrameAccused | TransferReport | VersionVerified
    | ApplyFailed | RefitDone | RefitFailed | LeaseProgress | SampleFinished | LeaseFailed
    | AnswersScored | ScoringFailed | PromptRead
)  # fmt: skip
ToPeer = (
    Welcome | Refused | EncodeVersion | ForgetForm | SignedRoot | SegmentPage | PlanEdges
    | VersionsRevoked | HeldVersions | LeaseGranted | LeaseCancelled | SampleAnswered | Drain | DialledBack
    | ScoreAnswers | ReadPrompt
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
        "PromptRead": PromptRead,
    },
    # These carry tokens or their logprobs, or one entry for each lease, peer, segment or version.
    large=(
        "Hello",
        "DeltasKept",
        "TransferReport",
        "LeaseProgress",
        "SampleFinished",
        "PromptRead",
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
        "HeldVersions": HeldVersions,
        "LeaseGranted": LeaseGranted,
        "LeaseCancelled": LeaseCancelled,
        "SampleAnswered": SampleAnswered,
        "Drain": Drain,
        "DialledBack": DialledBack,
        "ScoreAnswers": ScoreAnswers,
        "ReadPrompt": ReadPrompt,
    }
)
